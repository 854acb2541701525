"""A KV pool smaller than what is going on: evictions between the turns, retractions within them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch", reason="needs the server environment")
pytest.importorskip("sglang", reason="needs the server environment")

from leyline_client._models import Directive, apply_directives
from leyline_evals import soak
from leyline_evals.mirror import Mirror
from leyline_server_ext.embedded import EmbeddedServer
from leyline_server_ext.embedded.models import ensure_model

pytestmark = [pytest.mark.server, pytest.mark.slow]

POOL = 2_000
SESSIONS = 6
NEW_TOKENS = 400


@pytest.fixture(scope="module")
def tight() -> Iterator[EmbeddedServer]:
    # No room is set aside for what requests may still generate: the scheduler admits them and has to take some back.
    greedy = ["--schedule-conservativeness", "0"]
    with EmbeddedServer("tiny-gqa", dtype="float32", max_total_tokens=POOL, extra_args=greedy) as server:
        yield server


def test_random_edits_under_eviction_pressure_leak_nothing_and_stay_right(tight: EmbeddedServer) -> None:
    found = soak.run(tight.base_url, ensure_model("tiny-gqa"), edits=400, walkers=12, watched=4, seed=11)
    assert found["edits"] >= 400
    assert found["sessions"] > 12
    assert found["aborts"] > 0
    assert found["leaked_slots"] == 0
    assert found["compared_values"] > 50
    assert found["wrong_values"] == 0
    # Some sources were evicted before they were asked for, or this was no pressure; such turns say so.
    assert found["reasons"]


def test_edited_turns_that_are_retracted_while_decoding_stay_right(tight: EmbeddedServer) -> None:
    """Every session's next turn, computed on what the retracted one left, has the oracle's logits."""
    assert tight.log_path is not None
    before = retractions(tight.log_path)
    with httpx.Client(base_url=tight.base_url, timeout=300) as http, ThreadPoolExecutor(SESSIONS) as crew:
        errors = list(crew.map(lambda number: live(http, number), range(SESSIONS)))
        pool = soak.pool_counts(http)
    assert retractions(tight.log_path) > before
    assert pool["held"] == 0
    assert max(errors) < 2e-3


def live(http: httpx.Client, number: int) -> float:
    """A prompt, an edit with a long answer, and one more turn; the largest error of any answer's log-probabilities."""
    mirror = Mirror(ensure_model("tiny-gqa"))
    draw = random.Random(f"retracted {number}")
    session: str | None = None
    ids: list[int] = []
    errors = []
    for edits, count, wanted in (([], 150, 1), ([(20, 60)], 10, NEW_TOKENS), ([(5, 9), (200, 230)], 10, 1)):
        append = draw.choices(range(3, 250), k=count)
        body: dict[str, Any] = {
            "session": session,
            "directives": [{"start": start, "end": end, "replacement": []} for start, end in edits],
            "append": append,
            # Not ignore_eos: for such requests the scheduler sets aside all they will generate.
            "sampling_params": {"max_new_tokens": wanted, "min_new_tokens": wanted - 1},
            "return_logprob": True,
            "top_logprobs_num": 3,
        }
        reply = http.post("/leyline/v1/splice", json=body)
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        target = [*apply_directives(ids, [Directive(**one) for one in body["directives"]]), *append]
        error = mirror.follow(ids, target, answer)
        assert error is not None
        if wanted == 1:  # a minimum length masks the end of the reply out of the log-probabilities
            errors.append(error)
        session, ids = answer["session"], target + answer["output_ids"]
        assert len(answer["output_ids"]) >= wanted - 1
    http.delete(f"/leyline/v1/sessions/{session}").raise_for_status()
    return max(errors)


def retractions(log: Path) -> int:
    return log.read_text(errors="replace").count("Retract requests")
