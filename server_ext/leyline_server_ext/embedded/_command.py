"""The command line and the environment of the embedded server's processes."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from leyline_server_ext.embedded._templates import TOOL_CALL_PARSER
from leyline_server_ext.embedded.cpu_engine import ENV_FLAG

_STAND_IN = Path(__file__).parent / "stand_in"
_PLUGIN_GROUP = "sglang.srt.plugins"
_PLUGIN = "leyline = leyline_server_ext.plugin:register"
_FAST_BF16 = ("avx512_bf16", "amx_bf16")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What of SGLang's options the embedded server sets by name.

    Attributes:
        host: address to listen on.
        port: TCP port.
        context_length: longest sequence in tokens.
        max_total_tokens: KV pool size in tokens.
        dtype: float32, bfloat16 or float16, of weights and computation.
        kv_cache_dtype: as SGLang's option; "auto" follows `dtype`.
        stock: leave SGLang's own radix cache in place.
        api_key: key that every request must carry, None for an open server.
        extra_args: more SGLang options, appended last so that they win.
    """

    host: str
    port: int
    context_length: int
    max_total_tokens: int
    dtype: str
    kv_cache_dtype: str
    stock: bool
    api_key: str | None
    extra_args: Sequence[str]


def resolve_dtype(dtype: str, cpu_flags: frozenset[str] | None = None) -> str:
    """Turn "auto" into the dtype this CPU computes fastest in: bf16 with native instructions for it, else fp32."""
    if dtype != "auto":
        return dtype
    flags = _cpu_flags() if cpu_flags is None else cpu_flags
    return "bfloat16" if flags.intersection(_FAST_BF16) else "float32"


def _cpu_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def server_command(model: Path, options: ServerOptions) -> list[str]:
    """Arguments that start SGLang on the CPU with this interpreter."""
    named: dict[str, object] = {
        "--model-path": model,
        "--served-model-name": "default",
        "--host": options.host,
        "--port": options.port,
        "--device": "cpu",
        "--attention-backend": "torch_native",
        "--sampling-backend": "pytorch",
        "--grammar-backend": "none",
        "--dtype": options.dtype,
        "--kv-cache-dtype": options.kv_cache_dtype,
        "--context-length": options.context_length,
        "--max-total-tokens": options.max_total_tokens,
        "--tool-call-parser": TOOL_CALL_PARSER,
        "--log-level-http": "warning",
    }
    if options.api_key is not None:
        named["--api-key"] = options.api_key
    if not options.stock:
        named["--radix-cache-backend"] = "leyline"
    flat = [str(part) for pair in named.items() for part in pair]
    flags = ["--enable-cache-report", "--skip-server-warmup", "--sleep-on-idle"]
    return [sys.executable, "-m", "sglang.launch_server", *flat, *flags, *options.extra_args]


SPIN_COUNT = "2000"
"""How often a thread of torch's looks for work before it sleeps. By default it spins for milliseconds, on the core that
the thread it waits for may need: one other busy process then makes a server on two cores twenty times as slow."""


def server_environment(base: Mapping[str, str], work_dir: Path) -> dict[str, str]:
    """Environment of the server's processes.

    The stand-in kernels come first on the path; temporary files go to `work_dir`, which disappears with the server.
    In a source tree that is not installed, the packages' folders and, in `work_dir`, a description of the plugin entry
    point are added, since SGLang finds plugins through metadata only.
    """
    path = [_STAND_IN]
    if not any(point.name == "leyline" for point in entry_points(group=_PLUGIN_GROUP)):
        path += [_describe_plugin(work_dir), *_source_roots()]
    path += [Path(entry).resolve() for entry in base.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {
        **base,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(map(str, path))),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(work_dir),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_NCCL_SO_PATH": os.devnull,  # ranks talk over gloo: where NCCL loads, SGLang wants a GPU for it
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "GOMP_SPINCOUNT": base.get("GOMP_SPINCOUNT", SPIN_COUNT),
        ENV_FLAG: "1",
    }


def _source_roots() -> list[Path]:
    import leyline_client
    import leyline_server_ext

    return [Path(package.__path__[0]).parent.resolve() for package in (leyline_client, leyline_server_ext)]


def _describe_plugin(work_dir: Path) -> Path:
    from leyline_client._version import __version__

    folder = work_dir / "plugin"
    info = folder / f"leyline_client-{__version__}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: leyline-client\nVersion: {__version__}\n")
    (info / "entry_points.txt").write_text(f"[{_PLUGIN_GROUP}]\n{_PLUGIN}\n")
    return folder
