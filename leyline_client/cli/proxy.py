"""``leyline proxy``: a base URL for agents that take nothing else."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from leyline_client._async_session import AsyncLeylineSession
from leyline_client._client import LeylineClient
from leyline_client._errors import ConfigurationError, LeylineError
from leyline_client._models import Receipt

SHUTDOWN_S = 5
"""Seconds that open replies get when the proxy is told to stop."""

EXAMPLES = """\
examples:
  leyline proxy --upstream http://127.0.0.1:30000 --policy stale-tool-detector --policy truncate-older-than-n:n=3
  OPENAI_BASE_URL=http://127.0.0.1:8700/v1 OPENAI_API_KEY=unused your-agent
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand; its ``run(arguments)`` returns the exit status."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "proxy",
        help="an OpenAI-compatible base URL that edits and splices",
        description="Serve an OpenAI-compatible base URL: chat requests become turns of a LeylineSession.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--upstream", required=True, metavar="URL", help="the SGLang server with the extension")
    parser.add_argument(
        "--policy", action="append", default=[], metavar="NAME[:P=V,…]", help="may be repeated; in order"
    )
    parser.add_argument("--mode", choices=["amortize", "forget"], help="override the mode of the policies' edits")
    parser.add_argument("--on-history-edit", choices=["amortize", "forget", "error"], default="forget")
    parser.add_argument("--strategy", choices=["strict", "fallback", "observe"], default="strict")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=8700, help="port to listen on (default %(default)s; 0: any)")
    parser.add_argument(
        "--api-key", default=os.environ.get("LEYLINE_API_KEY"), help="of the upstream [LEYLINE_API_KEY]"
    )
    parser.add_argument(
        "--key", default=os.environ.get("LEYLINE_PROXY_KEY"), help="asked of clients [LEYLINE_PROXY_KEY]"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until interrupted."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    # httpx logs every URL at this level, and these may hold what nobody wants in a log.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        _serve(arguments)
    except LeylineError as error:
        print(f"leyline proxy: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def _serve(arguments: argparse.Namespace) -> None:
    try:
        import uvicorn

        from leyline_client._proxy import log_receipt, make_app
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"needs {error.name}: pip install 'leyline-client[proxy]'") from error
    if arguments.strategy == "strict":
        # Say now what every turn would say.
        with LeylineClient(arguments.upstream, api_key=arguments.api_key) as client:
            client.info()
    session = _session(arguments, log_receipt)
    listener = _listen(arguments.host, arguments.port)
    host, port = listener.getsockname()[:2]
    app = make_app(session, key=arguments.key)
    config = uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=SHUTDOWN_S)
    print(f"leyline proxy: http://{host}:{port}/v1 -> {session.client.base_url}", file=sys.stderr, flush=True)
    with listener:
        uvicorn.Server(config).run(sockets=[listener])


def _session(arguments: argparse.Namespace, on_receipt: Callable[[Receipt], None]) -> AsyncLeylineSession:
    return AsyncLeylineSession(
        arguments.upstream,
        api_key=arguments.api_key,
        policies=arguments.policy,
        mode=arguments.mode,
        on_history_edit=arguments.on_history_edit,
        strategy=arguments.strategy,
        on_receipt=on_receipt,
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
