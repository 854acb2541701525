"""``leyline doctor``: what is installed here, what is missing and how to get it, and what a server at a URL can do."""

import argparse
import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass
from typing import Any

import httpx

from leyline_client._client import LeylineClient
from leyline_client._errors import LeylineError
from leyline_client._version import __version__
from leyline_client._wire import ServerInfo

_MARKS = {True: "ok     ", False: "missing", None: "differs"}


@dataclass(frozen=True, slots=True)
class Need:
    """A distribution that some use of Leyline needs.

    Attributes:
        name: its name on PyPI.
        checked: the only version checked, or "" where any in the declared range will do.
        purpose: what it is for.
        remedy: how to get it.
    """

    name: str
    checked: str
    purpose: str
    remedy: str


_SERVER_REMEDY = 'pip install "leyline-client[server]" in SGLang\'s environment'

NEEDS = (
    Need("httpx", "", "client", "pip install leyline-client"),
    Need("pydantic", "", "client", "pip install leyline-client"),
    Need("openai", "", "typed OpenAI replies and transports", 'pip install "leyline-client[openai]"'),
    Need("tiktoken", "", "exact token counts", 'pip install "leyline-client[tiktoken]"'),
    Need("sglang", "0.5.23", "server", _SERVER_REMEDY),
    Need("torch", "2.14.1", "server", _SERVER_REMEDY),
    Need("triton", "3.8.0", "server, CUDA kernels", _SERVER_REMEDY),
    Need("transformers", "5.19.0", "server", _SERVER_REMEDY),
    Need("debug-gym", "1.3.0", "debug-gym evaluation (Python 3.12)", "make evals sets up an environment for it"),
)


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="say what is installed and whether a server carries the extension",
        description="Exit status 1 if a server at URL does not answer, lacks the extension or refuses to splice.",
    )
    parser.add_argument("url", nargs="?", metavar="URL", help="root of a running server, e.g. http://127.0.0.1:30000")
    parser.add_argument("--api-key", default=os.environ.get("LEYLINE_API_KEY"), help="default: $LEYLINE_API_KEY")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings."""
    print(
        f"leyline-client {__version__}, Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    for need in NEEDS:
        print(f"  {describe(need, installed_version(need.name))}")
    print(f"  {_plugin_line()}")
    print(f"  {_device_line()}")
    if arguments.url is None:
        return 0
    return check_server(arguments.url, arguments.api_key)


def installed_version(name: str) -> str | None:
    """Version of an installed distribution, None if it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(need: Need, version: str | None) -> str:
    """One line: mark, name, version, and where that is not good, what to do."""
    if version is None:
        return f"{_MARKS[False]}  {need.name} ({need.purpose}): {need.remedy}"
    if need.checked and version != need.checked:
        return f"{_MARKS[None]}  {need.name} {version} ({need.purpose}): checked with {need.checked} only"
    return f"{_MARKS[True]}  {need.name} {version} ({need.purpose})"


def _plugin_line() -> str:
    if installed_version("sglang") is None:
        return f"{_MARKS[False]}  no SGLang here that could find the extension"
    if importlib.metadata.entry_points(group="sglang.srt.plugins", name="leyline"):
        return f"{_MARKS[True]}  SGLang finds the extension here (entry point leyline)"
    return f"{_MARKS[False]}  SGLang does not find the extension here: pip install leyline-client"


def _device_line() -> str:
    if shutil.which("nvidia-smi") or os.path.exists("/dev/nvidia0"):
        return f"{_MARKS[True]}  an NVIDIA device: see `leyline serve`"
    return "none     no NVIDIA device: `leyline serve --embedded` runs on the CPU"


def check_server(url: str, api_key: str | None = None, transport: httpx.BaseTransport | None = None) -> int:
    """Print what the server at `url` says of itself; 0 if it splices, else 1."""
    try:
        with LeylineClient(url, api_key=api_key, transport=transport) as client:
            info = client.info()
    except LeylineError as error:
        print(f"{url}: {error}")
        return 1
    print(f"{url}: {_describe_server(info)}")
    for refusal in info.refusals:
        print(f"  refuses to splice: {refusal}")
    return 0 if info.enabled else 1


def _describe_server(info: ServerInfo) -> str:
    facts = {
        "protocol": info.protocol,
        "SGLang": info.sglang_version,
        "model": info.model,
        "context": info.context_length,
        "page size": info.page_size,
        "KV": info.kv_dtype,
        "modes": " and ".join(info.modes),
    }
    return f"Leyline {info.extension_version}, " + ", ".join(f"{name} {value}" for name, value in facts.items())
