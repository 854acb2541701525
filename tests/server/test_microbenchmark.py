"""The paper's single-prompt microbenchmark: prompts after which full context and re-prefill must disagree.

The independent oracle (transformers, cache surgery by the formula) says what a splice must answer; the running server's
first token and its log probabilities have to be the same in every case. How often that answer is the full context's or
the re-prefill's is a property of the model (random here), not of the splice: the rates are printed and recorded.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

torch = pytest.importorskip("torch", reason="needs the server environment")
pytest.importorskip("sglang", reason="needs the server environment")

from leyline_server_ext.embedded.models import ensure_model  # noqa: E402
from tests.oracle import Oracle  # noqa: E402

pytestmark = [pytest.mark.server, pytest.mark.slow]
Edit = tuple[int, int, list[int]]
CASES = 24
TRIES = 400
LENGTH = 90
TOP = 50
LOGPROB_ATOL = 2e-4
"""fp32 on both sides, other kernels: log probabilities of the tiny models lie within about 1e-5 of each other."""


@dataclass(frozen=True)
class Case:
    source: list[int]
    edits: list[Edit]
    tail: list[int]
    full: int
    reprefill: int
    wanted: Any
    """Log probabilities after the splice, by the oracle: ``(vocab,)``, double."""


def edited(source: list[int], edits: list[Edit]) -> list[int]:
    target = list(source)
    for start, end, replacement in reversed(edits):
        target[start:end] = replacement
    return target


def draw(seed: int) -> tuple[list[int], list[Edit], list[int]]:
    """A prompt, one to three edits (deletions and replacements), and what follows."""
    rng = random.Random(f"microbenchmark {seed}")
    source = rng.choices(range(3, 250), k=LENGTH)
    borders = sorted(rng.sample(range(5, LENGTH - 10), k=2 * rng.choice((1, 1, 2, 3))))
    edits = [
        (start, end, rng.choices(range(3, 250), k=rng.choice((0, 0, 3, 9))))
        for start, end in zip(borders[::2], borders[1::2], strict=True)
    ]
    return source, edits, rng.choices(range(3, 250), k=rng.choice((1, 4, 11)))


def find_cases(oracle: Oracle) -> tuple[list[Case], int]:
    """The first `CASES` prompts whose references disagree, and how many were looked at."""
    found: list[Case] = []
    for seed in range(TRIES):
        source, edits, tail = draw(seed)
        _, full = oracle.extend(None, source + tail)
        _, reprefill = oracle.extend(None, edited(source, edits) + tail)
        if int(full.argmax()) == int(reprefill.argmax()):
            continue
        _, logits = oracle.splice(source, len(source), edits, tail)
        wanted = torch.log_softmax(logits, -1)
        found.append(Case(source, edits, tail, int(full.argmax()), int(reprefill.argmax()), wanted))
        if len(found) == CASES:
            return found, seed + 1
    raise AssertionError(f"only {len(found)} of {TRIES} prompts tell full context and re-prefill apart")


@pytest.fixture(scope="module", params=["tiny-mla", "tiny-gqa"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, httpx.Client, Oracle]]:
    running = request.getfixturevalue(f"server_{request.param.replace('-', '_')}")
    with httpx.Client(base_url=running.base_url, timeout=120) as http:
        yield request.param, http, Oracle(ensure_model(request.param))


def splice(http: httpx.Client, **body: Any) -> dict[str, Any]:
    reply = http.post("/leyline/v1/splice", json={"sampling_params": {"max_new_tokens": 1, "temperature": 0}, **body})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def answer(http: httpx.Client, case: Case, number: int) -> dict[str, Any]:
    """The spliced turn. What the first turn generated has no KV and is taken out again."""
    salt = f"microbenchmark {number}"
    first = splice(http, append=case.source, cache_salt=salt)
    directives = [{"start": s, "end": e, "replacement": r} for s, e, r in case.edits]
    directives.append({"start": LENGTH, "end": LENGTH + len(first["output_ids"])})
    wanted = {"return_logprob": True, "top_logprobs_num": TOP}
    body = {"session": first["session"], "directives": directives, "append": case.tail, "cache_salt": salt, **wanted}
    reply = splice(http, **body)
    assert reply["receipt"]["executed"] == "amortize", reply["receipt"]
    assert reply["receipt"]["reason"] is None, reply["receipt"]
    return reply


def test_a_splice_answers_as_the_oracle_where_the_references_disagree(
    served: tuple[str, httpx.Client, Oracle], record_property: Any
) -> None:
    name, http, oracle = served
    cases, tried = find_cases(oracle)
    as_full = as_reprefill = 0
    worst = 0.0
    for number, case in enumerate(cases):
        reply = answer(http, case, number)
        token = reply["output_ids"][0]
        top = reply["meta"]["output_top_logprobs"][0]
        assert len(top) == TOP
        difference = max(abs(logprob - float(case.wanted[token_id])) for logprob, token_id, *_ in top)
        worst = max(worst, difference)
        assert token == int(case.wanted.argmax()), (number, case.edits)
        assert {token_id for _, token_id, *_ in top[:1]} == {token}
        assert difference < LOGPROB_ATOL, (number, case.edits)
        as_full += token == case.full
        as_reprefill += token == case.reprefill
    rates = {
        "cases": len(cases),
        "looked_at": tried,
        "first_token_as_full_context": as_full / len(cases),
        "first_token_as_reprefill": as_reprefill / len(cases),
        "largest_logprob_difference": worst,
    }
    for key, value in rates.items():
        record_property(f"{name} {key}", value)
    print(name, rates)
