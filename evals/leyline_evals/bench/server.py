"""The server under measurement, and its cache emptied between rounds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx

from leyline_client import LeylineClient


@contextlib.contextmanager
def leyline_server(base_url: str | None) -> Iterator[str]:
    """Root of a running server, or of an embedded one with SmolLM2 for as long as the block lasts."""
    if base_url is not None:
        yield base_url
        return
    from leyline_server_ext.embedded import EmbeddedServer

    with EmbeddedServer("smollm2", progress=say) as server:
        yield server.base_url


def flush(client: LeylineClient) -> None:
    """Empty the server's cache, so that no round evicts what another left behind.

    Raises:
        RuntimeError: the server refused.
    """
    reply = httpx.post(f"{client.base_url}/flush_cache", params={"timeout": 30}, timeout=60, trust_env=False)
    if reply.status_code != httpx.codes.OK:
        raise RuntimeError(f"the server's cache could not be emptied: HTTP {reply.status_code}")


def say(line: str) -> None:
    """One line of progress, at once."""
    print(line, flush=True)
