"""SGLang on the CPU for trying, developing and testing Leyline: models, processes, attention. No torch at import."""

from leyline_server_ext.embedded.errors import (
    EmbeddedError,
    MemoryShortError,
    ModelError,
    PortTakenError,
    ServerDiedError,
    StartTimeoutError,
)
from leyline_server_ext.embedded.launch import EmbeddedServer
from leyline_server_ext.embedded.models import ensure_model

__all__ = [
    "EmbeddedError",
    "EmbeddedServer",
    "MemoryShortError",
    "ModelError",
    "PortTakenError",
    "ServerDiedError",
    "StartTimeoutError",
    "ensure_model",
]
