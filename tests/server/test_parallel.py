"""Two ranks: with ``--dp`` a session keeps to one, with ``--tp`` all decide alike; answers and rows as with one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch", reason="needs the server environment")
pytest.importorskip("sglang", reason="needs the server environment")

from leyline_client._models import Directive, apply_directives
from leyline_evals.mirror import Mirror
from leyline_server_ext.embedded import EmbeddedServer
from leyline_server_ext.embedded.models import ensure_model
from tests.oracle import Oracle
from tests.server.ranks import Ranks
from tests.server.rows import RowServer, assert_rows, tokens

pytestmark = [pytest.mark.server, pytest.mark.slow]

POOL = 1536
"""KV slots of each rank."""
NEW_TOKENS = 4
Edits = list[tuple[int, int, list[int]]]
TURNS: tuple[Edits, ...] = (
    [(40, 90, [])],
    [(10, 10, [5, 6, 7, 8]), (60, 80, [9, 10, 11])],
    [(20, 21, [12, 13]), (100, 130, [])],
)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(ensure_model("tiny-gqa"))


def serve(option: str, dumps: Path, oracle: Oracle) -> Iterator[Ranks]:
    env = {"LEYLINE_DUMP_DIR": str(dumps)}
    with EmbeddedServer(
        "tiny-gqa", dtype="float32", max_total_tokens=POOL, env=env, extra_args=[option, "2"]
    ) as running:
        ranks = Ranks(running, dumps, oracle, split=option == "--tp")
        with ranks.http:
            yield ranks


@pytest.fixture(scope="module")
def dp(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> Iterator[Ranks]:
    yield from serve("--dp", tmp_path_factory.mktemp("dp"), oracle)


@pytest.fixture(scope="module")
def tp(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> Iterator[Ranks]:
    yield from serve("--tp", tmp_path_factory.mktemp("tp"), oracle)


@dataclass
class Conversation:
    """A session, and the oracle following it."""

    server: RowServer
    name: str
    session: str = ""
    held: list[int] = field(default_factory=list)
    """Prompt and answer so far."""

    def __post_init__(self) -> None:
        self.mirror = Mirror(ensure_model("tiny-gqa"))

    def turn(self, edits: Edits, append: list[int]) -> dict[str, Any]:
        """One turn; the answer must be the oracle's."""
        directives = [{"start": s, "end": e, "replacement": r} for s, e, r in edits]
        more = {"session": self.session} if self.session else {}
        answer = self.server.splice(
            directives=directives,
            append=append,
            cache_salt=self.name,
            sampling_params={"max_new_tokens": NEW_TOKENS, "ignore_eos": True},
            return_logprob=True,
            top_logprobs_num=3,
            **more,
        )
        self.session = answer["session"]
        target = [*apply_directives(self.held, [Directive(**one) for one in directives]), *append]
        difference = self.mirror.follow(self.held, target, answer)
        assert difference is not None
        assert difference < 1e-3, answer["receipt"]
        # Of the answer, all but its last token are cached too.
        self.mirror.state, _ = self.mirror.oracle.extend(self.mirror.state, answer["output_ids"][:-1])
        self.held = target + answer["output_ids"]
        return answer

    def cached(self) -> list[int]:
        """The tokens whose rows the last request left."""
        return self.held[:-1]


def play(server: RowServer, names: list[str]) -> list[dict[str, Any]]:
    """Sessions in turn, each with a long prompt and three edits; rows and answers held against the oracle."""
    conversations = [Conversation(server, name) for name in names]
    answers = [one.turn([], tokens(one.name, 240)) for one in conversations]
    for number, edits in enumerate(TURNS):
        for one in conversations:
            tail = tokens(f"{one.name} {number}", 9)
            answer = one.turn(edits, tail)
            receipt = answer["receipt"]
            assert (receipt["executed"], receipt["reason"]) == ("amortize", None)
            assert receipt["prefilled_tokens"] == len(tail) + 1 + sum(len(r) for _, _, r in edits)
            assert_rows(server, one.cached(), one.mirror.state)
            answers.append(answer)
    return answers


def essence(answer: dict[str, Any]) -> tuple[Any, ...]:
    """What must not depend on the number of ranks."""
    receipt = answer["receipt"]
    counts = ("cached_tokens", "rotated_tokens", "prefilled_tokens", "slots_allocated", "slots_released", "segments")
    return answer["output_ids"], [receipt[name] for name in counts]


@pytest.fixture(scope="module")
def alone(server_tiny_gqa: EmbeddedServer, row_dumps: Path, oracle: Oracle) -> list[tuple[Any, ...]]:
    """The same conversations on one rank."""
    server = RowServer(server_tiny_gqa.base_url, row_dumps, oracle)
    with server.http:
        return [essence(answer) for answer in play(server, ["a", "b", "c", "d"])]


def test_sessions_stay_with_their_rank_and_answer_as_on_one(dp: Ranks, alone: list[tuple[Any, ...]]) -> None:
    conversations = play(dp, ["a", "b", "c", "d"])
    assert [essence(answer) for answer in conversations] == alone


def test_all_tensor_parallel_ranks_hold_their_heads_and_answer_as_one(tp: Ranks, alone: list[tuple[Any, ...]]) -> None:
    assert [essence(answer) for answer in play(tp, ["a", "b", "c", "d"])] == alone


def test_undo_purge_and_end_reach_the_rank_of_the_session(dp: Ranks) -> None:
    pair = [Conversation(dp, "even"), Conversation(dp, "odd")]
    ranks = []
    for one in pair:
        one.turn([], tokens(one.name, 240))
        ranks.append(dp.rank(one.cached()))
    assert sorted(ranks) == [0, 1]
    for one, rank in zip(pair, ranks, strict=True):
        path = f"/leyline/v1/sessions/{one.session}"
        post = {"session": one.session, "cache_salt": one.name}
        dp.splice(**post, directives=[{"start": 30, "end": 60}], append=[8, 8, 8], keep_source=True)
        assert _ok(dp.http.post(f"{path}/undo", json={}, params={"cache_salt": one.name}))
        again = dp.splice(**post, append=[7, 7])["receipt"]
        assert (again["prefilled_tokens"], again["influenced_tokens"]) == (3, 0)
        edit = {"directives": [{"start": 20, "end": 40}], "append": [9, 9]}
        assert dp.splice(**post, **edit)["receipt"]["executed"] == "amortize"
        purged = _ok(dp.http.post(f"{path}/purge", json={}, params={"cache_salt": one.name}))
        assert purged.json()["receipt"]["dropped_tokens"] > 150
        dp.splice(**post, append=[4])
        assert dp.splice(**post, **edit)["receipt"]["executed"] == "amortize"
        assert _ok(dp.http.delete(path, params={"cache_salt": one.name}))
        # Purge and end ride on a one-token request; nobody else sends this session's first token alone.
        assert dp.rank(one.held[:1]) == rank


def _ok(reply: httpx.Response) -> httpx.Response:
    assert reply.is_success, reply.text
    return reply


@pytest.mark.parametrize("ranks", ["dp", "tp"])
def test_ranks_agree_under_eviction(ranks: str, request: pytest.FixtureRequest) -> None:
    """More tokens than slots. Ranks of a tensor parallel server that evicted differently would hang or crash."""
    server: Ranks = request.getfixturevalue(ranks)
    conversations = [Conversation(server, f"pressure {n}") for n in range(6)]
    for one in conversations:
        one.turn([], tokens(one.name, 600 if ranks == "dp" else 300))
    missing = 0
    for start, end in ((40, 90), (100, 130)):
        for one in conversations:
            receipt = one.turn([(start, end, [])], tokens(one.name + "tail", 5))["receipt"]
            missing += receipt["executed"] != "amortize"
            assert_rows(server, one.cached(), one.mirror.state)
    assert missing > 0, "the pool was large enough for everything"
