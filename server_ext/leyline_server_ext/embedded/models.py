"""The models the embedded server knows by name, made or converted once into a cache folder."""

from collections.abc import Callable
from pathlib import Path

from leyline_server_ext.embedded import _smollm2, _store, _tiny
from leyline_server_ext.embedded._templates import chat_template_digest
from leyline_server_ext.embedded.errors import ModelError

Progress = Callable[[str], None]

_MAKERS: dict[str, tuple[str, Callable[[Path, Progress], None]]] = {
    "smollm2": (_smollm2.VERSION, _smollm2.make),
    "tiny-mla": (_tiny.VERSION, _tiny.make_mla),
    "tiny-gqa": (_tiny.VERSION, _tiny.make_gqa),
    "tiny-chat": (
        f"{_tiny.VERSION}-{_smollm2.VERSION}",
        lambda folder, progress: _tiny.make_chat(folder, progress, ensure_model("smollm2", progress)),
    ),
}

MODEL_NAMES = tuple(_MAKERS)
"""Names `ensure_model` accepts besides paths."""


def ensure_model(name: str, progress: Progress = lambda _message: None) -> Path:
    """Folder of a model that SGLang and transformers can load.

    A known name is made on first use (a minute at most, seconds for the tiny ones) and kept under ``$LEYLINE_CACHE``,
    else ``$XDG_CACHE_HOME/leyline``, else ``~/.cache/leyline``. Anything else is taken as a path. Safe to call from
    several processes at once: one works, the others wait.

    Args:
        name: one of `MODEL_NAMES` or the path of a Hugging Face style model folder.
        progress: called with one line of text per step.

    Raises:
        ModelError: the name is unknown and no folder with a ``config.json``, or making it failed.
    """
    if name not in _MAKERS:
        folder = Path(name)
        if (folder / "config.json").is_file():
            return folder.resolve()
        raise ModelError(f"no model {name!r}: not one of {', '.join(MODEL_NAMES)}, and no folder with a config.json")
    version, make = _MAKERS[name]
    return _store.ensure(f"{name}-{version}-{chat_template_digest()}", lambda folder: make(folder, progress), progress)
