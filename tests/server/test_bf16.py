"""A bf16 cache: what a splice only copies is the same bit for bit, and what it turns stays within bf16's rounding."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="needs the server environment")
pytest.importorskip("sglang", reason="needs the server environment")

import torch

from leyline_server_ext.embedded import EmbeddedServer
from leyline_server_ext.embedded.models import ensure_model
from tests.oracle import Oracle
from tests.server.rows import BATCHES, LENGTH, RowServer, edited, tokens

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture(scope="module", params=["tiny-mla", "tiny-gqa"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RowServer]:
    dumps = tmp_path_factory.mktemp("bf16-rows")
    with EmbeddedServer(request.param, dtype="bfloat16", env={"LEYLINE_DUMP_DIR": str(dumps)}) as running:
        served = RowServer(running.base_url, dumps, Oracle(ensure_model(request.param)))
        yield served
        served.http.close()


@pytest.mark.parametrize("name", ["deletion", "longer replacement", "four in one batch"])
def test_what_is_copied_is_equal_bit_for_bit(server: RowServer, name: str) -> None:
    edits, prompt, tail = BATCHES[name], tokens("bf16" + name, LENGTH), tokens("bf16 tail" + name, 5)
    first = server.splice(append=prompt)
    old_k, old_v = server.rows(prompt)
    body = {"directives": [{"start": s, "end": e, "replacement": r} for s, e, r in edits], "append": tail}
    receipt = server.splice(session=first["session"], **body)["receipt"]
    assert receipt["reason"] is None, receipt
    assert receipt["rotated_tokens"] > 0, receipt

    target, kept = edited(prompt, edits)
    new_k, new_v = server.rows(target + first["output_ids"] + tail)
    for start, end, to in kept:
        old, new = slice(start, end), slice(to, to + end - start)
        if old_v is not None and new_v is not None:
            assert torch.equal(new_v[:, new], old_v[:, old])
        bare_old, rope_old = server.oracle.split(old_k[:, old])
        bare_new, rope_new = server.oracle.split(new_k[:, new])
        assert torch.equal(bare_new, bare_old)
        exact = server.oracle.turn(rope_old, to - start).double()
        # bf16 rounds to within 2^-9 of the value, once; fp32 arithmetic adds what cancels in a pair.
        allowed = 2**-8 * exact.abs() + 1e-5 * exact.norm(dim=-1, keepdim=True)
        assert ((rope_new.double() - exact).abs() <= allowed).all()
        assert torch.equal(rope_new, rope_old) == (to == start)
