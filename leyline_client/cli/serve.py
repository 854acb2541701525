"""``leyline serve``: SGLang with the extension, here on the CPU (``--embedded``) or as a command for a GPU host."""

import argparse
import shlex
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

DEFAULT_PORT = 30000
CHECKED_SGLANG = "0.5.23"
EMBEDDED_REMEDY = (
    "in a checkout, `make demo` makes an environment that has it (.venvs/server-*/bin/leyline); "
    'elsewhere pip install "leyline-client[server]"'
)


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model with the extension",
        description="With --embedded: run SGLang on this machine's CPU until Ctrl-C. Without: print the command that "
        "runs it on a GPU host.",
        epilog="What follows -- goes to SGLang as it is.",
    )
    parser.add_argument("--embedded", action="store_true", help="run here, on the CPU")
    parser.add_argument(
        "--model",
        help="smollm2 (default), tiny-mla, tiny-gqa, tiny-chat or a folder; on a GPU host any SGLang model",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=DEFAULT_PORT, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--context-length", type=_positive, metavar="TOKENS", help="longest sequence")
    parser.add_argument("--max-total-tokens", type=_positive, metavar="TOKENS", help="size of the KV pool")
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="default: %(default)s"
    )
    parser.add_argument(
        "--kv-cache-dtype", default="auto", metavar="DTYPE", help="SGLang's option; auto follows --dtype"
    )
    parser.add_argument("--api-key", help="key that every request must carry")
    parser.add_argument("--stock", action="store_true", help="leave SGLang's own radix cache in place")
    parser.add_argument("--log", type=Path, metavar="FILE", help="where the server's output goes (embedded)")
    parser.add_argument("sglang_arguments", nargs="*", metavar="-- SGLANG OPTIONS")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve, or say how."""
    if arguments.embedded:
        return _serve_embedded(arguments)
    print(gpu_instructions(arguments))
    return 0


def gpu_instructions(arguments: argparse.Namespace) -> str:
    """What to install and run on a GPU host, with the given options."""
    command = ["python", "-m", "sglang.launch_server", "--model-path", arguments.model or "MODEL"]
    command += ["--host", arguments.host, "--port", str(arguments.port or DEFAULT_PORT)]
    optional = {
        "--context-length": arguments.context_length,
        "--max-total-tokens": arguments.max_total_tokens,
        "--dtype": arguments.dtype if arguments.dtype != "auto" else None,
        "--kv-cache-dtype": arguments.kv_cache_dtype if arguments.kv_cache_dtype != "auto" else None,
        "--api-key": arguments.api_key,
        "--radix-cache-backend": None if arguments.stock else "leyline",
    }
    for option, value in optional.items():
        if value is not None:
            command += [option, str(value)]
    command += ["--enable-cache-report", *arguments.sglang_arguments]
    url = f"http://{arguments.host}:{arguments.port or DEFAULT_PORT}"
    lines = [
        '# On the GPU host, in the environment that runs SGLang (from a checkout: ".[server]" instead of the name):',
        f'pip install "leyline-client[server]"    # brings sglang=={CHECKED_SGLANG}, the version checked',
        shlex.join(command),
    ]
    if not arguments.stock:
        lines += ["# Then, from anywhere:", f"leyline doctor {url}"]
    lines += ["#", "# No GPU? `leyline serve --embedded` runs SGLang on this machine's CPU."]
    return "\n".join(lines)


def _serve_embedded(arguments: argparse.Namespace) -> int:
    from leyline_server_ext.embedded import EmbeddedError, EmbeddedServer

    if find_spec("sglang") is None:
        print(f"leyline: needs SGLang {CHECKED_SGLANG} here: {EMBEDDED_REMEDY}", file=sys.stderr)
        return 1
    if arguments.log is not None and (fault := _cannot_write(arguments.log)):
        print(f"leyline: --log {arguments.log}: {fault}", file=sys.stderr)
        return 1
    options: dict[str, Any] = {}
    if arguments.max_total_tokens is not None:
        options["max_total_tokens"] = arguments.max_total_tokens
    server = EmbeddedServer(
        arguments.model or "smollm2",
        host=arguments.host,
        port=arguments.port,
        context_length=arguments.context_length,
        dtype=arguments.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        api_key=arguments.api_key,
        stock=arguments.stock,
        extra_args=arguments.sglang_arguments,
        log_path=arguments.log,
        progress=lambda line: print(line, flush=True),
        **options,
    )
    before = signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        with server:
            print(f"serving {server.model} at {server.base_url}; Ctrl-C stops it", flush=True)
            code = server.wait()
            print(f"leyline: the server ended with code {code}\n{server.log_tail()}", file=sys.stderr)
            return 1
    except (EmbeddedError, OSError) as error:
        print(f"leyline: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", flush=True)
        return 0
    finally:
        signal.signal(signal.SIGTERM, before)


def _cannot_write(log: Path) -> str:
    """Why no log can be written there; empty where nothing is known to be in the way. Said before a model is made."""
    if log.is_dir():
        return "is a folder"
    return "" if log.absolute().parent.is_dir() else f"there is no folder {log.parent}"


def _raise_interrupt(_signum: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError("a port is between 0 and 65535")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
