"""The engine's other ways, same values: page sizes, overlap scheduling off, chunked prefill, pages on two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

pytest.importorskip("torch", reason="needs the server environment")
pytest.importorskip("sglang", reason="needs the server environment")

from leyline_client._models import Directive, apply_directives
from leyline_evals.mirror import Mirror
from leyline_server_ext.embedded import EmbeddedServer
from leyline_server_ext.embedded.models import ensure_model
from tests.server.ranks import Ranks
from tests.server.rows import BATCHES, RowServer, assert_rows, tokens

pytestmark = [pytest.mark.server, pytest.mark.slow]

WAYS = {
    "chunks of 64": ("tiny-mla", ["--chunked-prefill-size", "64"]),
    "no overlap": ("tiny-gqa", ["--disable-overlap-schedule"]),
    "page 16, chunks of 64": ("tiny-mla", ["--page-size", "16", "--chunked-prefill-size", "64"]),
    "page 64, no overlap": ("tiny-gqa", ["--page-size", "64", "--disable-overlap-schedule"]),
    "page 16, two ranks": ("tiny-gqa", ["--page-size", "16", "--tp", "2"]),
}


CHAIN = ["four in one batch", "replacement", "four, adjacent", "insertion"]
LOGPROBS: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 3}


@dataclass
class Way:
    """A server started in one of the ways, and what its sessions' KV must be."""

    rows: RowServer
    mirror: Mirror
    page: int

    def edited(
        self, session: str, source: list[int], batch: str, append: list[int]
    ) -> tuple[dict[str, Any], list[int]]:
        """One edited turn; the reply, and the tokens the session now stands at (the last one was never fed)."""
        edits = [Directive(start=2 * s, end=2 * e, replacement=tuple(r)) for s, e, r in BATCHES[batch]]
        target = [*apply_directives(source, edits), *append]
        reply = self.rows.splice(
            session=session, directives=[one.model_dump(mode="json") for one in edits], append=append, **LOGPROBS
        )
        assert reply["receipt"]["reason"] is None, reply["receipt"]
        difference = self.mirror.follow(source, target, reply)
        assert difference is not None
        assert difference < 1e-3
        assert self.mirror.state is not None
        assert_rows(self.rows, target, self.mirror.state)
        return reply, target + reply["output_ids"]


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Way]:
    model, extra = WAYS[request.param]
    dumps = tmp_path_factory.mktemp("ways")
    with EmbeddedServer(model, dtype="float32", env={"LEYLINE_DUMP_DIR": str(dumps)}, extra_args=extra) as running:
        http = httpx.Client(base_url=running.base_url, timeout=120)
        with http:
            page = http.get("/leyline/v1/info").json()["page_size"]
        mirror = Mirror(ensure_model(model), page)
        if "--tp" in extra:
            served: RowServer = Ranks(running, dumps, mirror.oracle, split=True)
        else:
            served = RowServer(running.base_url, dumps, mirror.oracle)
        with served.http:
            yield Way(served, mirror, page)


def begun(way: Way, name: str) -> tuple[str, list[int]]:
    """A new session of 600 tokens."""
    prompt = tokens("way" + name, 600)
    way.mirror.reset()
    first = way.rows.splice(append=prompt, **LOGPROBS)
    difference = way.mirror.follow([], prompt, first)
    assert difference is not None
    assert difference < 1e-3
    return first["session"], prompt + first["output_ids"]


@pytest.mark.parametrize("name", BATCHES)
def test_rows_equal_the_oracle_in_every_way(way: Way, name: str) -> None:
    session, source = begun(way, name)
    tail = tokens("way tail" + name, 70)
    reply, _ = way.edited(session, source, name, tail)
    replaced = [len(replacement) for _, _, replacement in BATCHES[name]]
    exact = len(tail) + 1 + sum(replaced)
    # On a page grid what sticks out of a whole page is computed: at the end of the source, of the last kept run, and
    # around each replacement.
    pages = 2 + 2 * sum(1 for length in replaced if length)
    assert exact <= reply["receipt"]["prefilled_tokens"] <= exact + pages * (way.page - 1)


def test_rows_equal_the_oracle_along_a_chain_of_edits(way: Way) -> None:
    session, source = begun(way, "chain")
    for number, name in enumerate(CHAIN):
        reply, source = way.edited(session, source, name, tokens(f"chain tail {number}", 150))
        assert reply["receipt"]["executed"] == "amortize"
    assert reply["receipt"]["generation"] == len(CHAIN)
