"""The server an evaluation runs against: one that is running already, or an embedded one for as long as needed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyline_evals.common import EvalError

if TYPE_CHECKING:
    from leyline_server_ext.embedded import EmbeddedServer

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Served:
    """A running server. ``embedded`` is set where it was started here."""

    base_url: str
    embedded: EmbeddedServer | None = None

    def last_words(self) -> str:
        """Where the log of a server that ended can be read; "" for a server of somebody else."""
        if self.embedded is None or self.embedded.pids():
            return ""
        return f"; the server ended, its log: {self.embedded.log_path}"


def add_arguments(parser: argparse.ArgumentParser, model: str = "smollm2") -> None:
    """Add ``--base-url``, ``--model`` and what else says which server is meant."""
    parser.add_argument("--base-url", metavar="URL", help="a running server (default: start an embedded one)")
    parser.add_argument("--model", default=model, help="of the embedded server: a name or a folder (%(default)s)")
    parser.add_argument("--context-length", type=int, metavar="TOKENS", help="of the embedded server")
    parser.add_argument("--max-total-tokens", type=int, metavar="TOKENS", help="KV pool of the embedded server")
    parser.add_argument("--dtype", default="auto", help="of the embedded server (%(default)s)")
    parser.add_argument("--server-log", type=Path, metavar="FILE", help="where the embedded server's output goes")


@contextmanager
def served(arguments: argparse.Namespace, progress: Progress, **overrides: Any) -> Iterator[Served]:
    """The server `add_arguments` describes; an embedded one is ended on leaving.

    Raises:
        EvalError: an embedded server is wanted and cannot be started here.
    """
    if arguments.base_url:
        yield Served(arguments.base_url)
        return
    if find_spec("sglang") is None:
        raise EvalError("SGLang is not installed here: give --base-url, or use the server environment")
    from leyline_server_ext.embedded import EmbeddedError, EmbeddedServer

    options: dict[str, Any] = {"dtype": arguments.dtype, "log_path": arguments.server_log, "progress": progress}
    for name in ("context_length", "max_total_tokens"):
        if getattr(arguments, name) is not None:
            options[name] = getattr(arguments, name)
    server = EmbeddedServer(arguments.model, **{**options, **overrides})
    try:
        server.start()
    except EmbeddedError as error:
        raise EvalError(str(error)) from error
    try:
        yield Served(server.base_url, server)
    finally:
        server.stop()
