"""One embedded server per model for the whole test session, started when the first test asks for it."""

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from leyline_server_ext.embedded import EmbeddedServer


# Before torch is loaded; see leyline_server_ext.embedded._command.SPIN_COUNT.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def pytest_configure() -> None:
    """Ctrl-C works, and a change meets the same examples every time.

    A shell starts background jobs with SIGINT ignored, and every child inherits that: the tests of Ctrl-C would hang.
    Hypothesis looks for new examples where it was asked to (``LEYLINE_NIGHTLY=1``, ``LEYLINE_EXAMPLES=20``).
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if find_spec("hypothesis") is not None and not {"LEYLINE_NIGHTLY", "LEYLINE_EXAMPLES"} & os.environ.keys():
        from hypothesis import settings

        settings.register_profile("repeatable", derandomize=True)
        settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever uses one of the servers below counts as a ``server`` test."""
    for item in items:
        if any(name.startswith("server_") for name in getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.server)


def _serve(model: str, dtype: str, dumps: Path | None = None) -> Iterator["EmbeddedServer"]:
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed in this environment: use the server environment (make test)")
    from leyline_server_ext.embedded import EmbeddedServer

    env = {} if dumps is None else {"LEYLINE_DUMP_DIR": str(dumps)}
    with EmbeddedServer(model, dtype=dtype, env=env) as server:
        yield server


@pytest.fixture(scope="session")
def row_dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny servers leave the KV rows of their newest finished requests (see `leyline_server_ext.probe`)."""
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="session")
def server_smollm2() -> Iterator["EmbeddedServer"]:
    """SmolLM2-135M-Instruct with the extension, in the dtype users get."""
    yield from _serve("smollm2", "auto")


@pytest.fixture(scope="session")
def server_tiny_mla(row_dumps: Path) -> Iterator["EmbeddedServer"]:
    """The tiny MLA model with the extension, weights and KV cache in fp32."""
    yield from _serve("tiny-mla", "float32", row_dumps)


@pytest.fixture(scope="session")
def server_tiny_gqa(row_dumps: Path) -> Iterator["EmbeddedServer"]:
    """The tiny GQA model with the extension, weights and KV cache in fp32."""
    yield from _serve("tiny-gqa", "float32", row_dumps)
