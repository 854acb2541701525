"""Values: every K and V row of a spliced sequence on the running server against the transformers oracle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the server environment")
pytest.importorskip("sglang", reason="needs the server environment")

from leyline_server_ext.embedded.models import ensure_model
from tests.oracle import Oracle
from tests.server.rows import BATCHES, LENGTH, RowServer, check_batch, tokens

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture(scope="module", params=["tiny-mla", "tiny-gqa"])
def server(request: pytest.FixtureRequest, row_dumps: Path) -> Iterator[RowServer]:
    running = request.getfixturevalue(f"server_{request.param.replace('-', '_')}")
    served = RowServer(running.base_url, row_dumps, Oracle(ensure_model(request.param)))
    try:
        yield served
    finally:
        served.http.close()


@pytest.mark.parametrize("name", BATCHES)
def test_every_row_of_a_spliced_sequence_equals_the_oracle(server: RowServer, name: str) -> None:
    assert check_batch(server, name)["reason"] is None


def test_an_edited_turn_prefills_only_replacements_and_tail(server: RowServer) -> None:
    prompt, tail = tokens("reuse", LENGTH), tokens("reuse tail", 9)
    first = server.splice(append=prompt)
    for replacement, extra in (([], 0), ([7, 8, 9], 3)):
        body = {"directives": [{"start": 50, "end": 80, "replacement": replacement}], "append": tail}
        reply = server.splice(session=first["session"], **body)
        receipt = reply["receipt"]
        # The last generated token was never fed back: it is part of the new tail.
        assert receipt["prefilled_tokens"] == len(tail) + 1 + extra, receipt
        assert receipt["replacement_tokens"] == extra
        assert receipt["cached_tokens"] + receipt["prefilled_tokens"] == receipt["prompt_tokens"]
        assert receipt["rotated_tokens"] > 0
