"""Faults: clients that go away, many at once, bodies that make no sense, a server that is restarted."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang", reason="needs the server environment")

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture(scope="module")
def http(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    running = request.getfixturevalue("server_tiny_gqa")
    with httpx.Client(base_url=running.base_url, timeout=120) as client:
        yield client


def tokens(seed: str, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 250), k=count)


def splice(http: httpx.Client, **body: Any) -> dict[str, Any]:
    reply = http.post("/leyline/v1/splice", json={"sampling_params": {"max_new_tokens": 1}, **body})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def idle_pool(http: httpx.Client) -> dict[str, int]:
    """Pool counts once nothing is held any more, with the cache emptied."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if http.post("/flush_cache").status_code == 200:
            pool: dict[str, int] = splice(http, append=[1])["receipt"]["pool_before"]
            if pool["held"] == 0:
                return pool
        time.sleep(0.5)
    raise AssertionError("the server never became idle")


def test_a_client_that_leaves_at_any_moment_costs_no_slot(http: httpx.Client) -> None:
    before, cut_short = idle_pool(http), 0
    # The engine looks every four seconds whether a client is still there: 300 tokens may be done by then, not 4,000.
    lengths = [300, 4_000] * 5
    for number, (patience, length) in enumerate(zip([0.001, 0.01, 0.03, 0.1, 0.3] * 2, lengths, strict=True)):
        session = splice(http, append=tokens(f"leave {number}", 300))["session"]
        body = {
            "session": session,
            "directives": [{"start": 20, "end": 90, "replacement": [5, 6, 7] if number % 3 else []}],
            "append": tokens(f"leave tail {number}", 20),
            "sampling_params": {"max_new_tokens": length, "ignore_eos": True},
        }
        with pytest.raises(httpx.TimeoutException):
            http.post("/leyline/v1/splice", json=body, timeout=httpx.Timeout(60, read=patience))
        # Whether the turn was cut short or complete when its client left, `expected_version` sends it again safely.
        body |= {"sampling_params": {"max_new_tokens": 1}, "expected_version": 1}
        again = http.post("/leyline/v1/splice", json=body)
        if again.status_code == 200:
            assert again.json()["version"] == 2
            cut_short += 1
        else:
            assert (again.status_code, again.json()["error"]["code"]) == (409, "version_conflict"), again.text
            assert again.json()["error"]["detail"] == {"version": 2}
            assert splice(http, session=session, append=[3], expected_version=2)["version"] == 3
    assert cut_short
    after = idle_pool(http)
    assert (after["free"], after["cached"]) == (before["free"], before["cached"])


def test_a_stream_that_is_cut_leaves_the_session_usable(http: httpx.Client) -> None:
    before = idle_pool(http)
    messages = [{"role": "user", "content": "stream " * 30}]
    body = {"model": "d", "messages": messages, "stream": True, "max_tokens": 400, "ignore_eos": True, "leyline": {}}
    first = http.post("/leyline/v1/chat/completions", json={**body, "stream": False, "max_tokens": 2}).json()
    body["leyline"] = {"session": first["leyline"]["session"]}
    for _ in range(4):
        with http.stream("POST", "/leyline/v1/chat/completions", json=body) as reply:
            for number, _line in enumerate(reply.iter_lines()):
                if number > 3:
                    break
    again = http.post("/leyline/v1/chat/completions", json={**body, "stream": False, "max_tokens": 2})
    assert again.status_code == 200, again.text
    assert again.json()["leyline"]["version"] == 2
    after = idle_pool(http)
    assert (after["free"], after["cached"]) == (before["free"], before["cached"])


def test_sixty_four_sessions_at_once(http: httpx.Client) -> None:
    before = idle_pool(http)
    barrier = threading.Barrier(16)

    def live(number: int) -> int:
        if number < 16:
            barrier.wait(60)
        first = splice(http, append=tokens(f"crowd {number}", 200))
        second = splice(http, session=first["session"], directives=[{"start": 10, "end": 60}], append=[1, 2, 3])
        assert second["receipt"]["prefilled_tokens"] <= 204
        return int(second["receipt"]["rotated_tokens"])

    with ThreadPoolExecutor(16) as crew:
        rotated = list(crew.map(live, range(64)))
    assert sum(count == 140 for count in rotated) > 50, "the pool holds them all, so nearly all must be spliced"
    after = idle_pool(http)
    assert (after["free"], after["cached"]) == (before["free"], before["cached"])


def test_turns_of_one_session_are_serialised(http: httpx.Client) -> None:
    session = splice(http, append=tokens("one session", 100))["session"]
    with ThreadPoolExecutor(8) as crew:
        replies = list(crew.map(lambda _: splice(http, session=session, append=[5]), range(8)))
    assert sorted(reply["version"] for reply in replies) == list(range(2, 10))
    lengths = sorted(reply["receipt"]["prompt_tokens"] for reply in replies)
    assert lengths == [102 + 2 * number for number in range(8)]


def test_compare_and_swap_lets_exactly_one_of_two_through(http: httpx.Client) -> None:
    session = splice(http, append=tokens("cas", 100))["session"]
    body = {"session": session, "append": [5], "expected_version": 1, "sampling_params": {"max_new_tokens": 1}}
    with ThreadPoolExecutor(4) as crew:
        codes = sorted(crew.map(lambda _: http.post("/leyline/v1/splice", json=body).status_code, range(4)))
    assert codes == [200, 409, 409, 409]


def test_a_body_that_is_too_large_is_refused(http: httpx.Client) -> None:
    reply = http.post("/leyline/v1/splice", content=b'{"append": [' + b"1," * (40 << 20) + b"1]}")
    assert reply.status_code == 413
    assert reply.json()["error"]["code"] == "payload_too_large"
    assert splice(http, append=[1, 2])["version"] == 1


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
FIELDS = ["session", "expected_version", "directives", "append", "sampling_params", "messages", "leyline", "model"]
FIELDS += ["cache_salt", "keep_source", "purge", "return_logprob", "top_logprobs_num", "stream", "tools", "n", "edits"]


@pytest.mark.parametrize("path", ["splice", "plan", "render", "chat/completions"])
def test_nonsense_gets_a_typed_refusal_and_the_server_goes_on(http: httpx.Client, path: str) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6) | JSON)
    def check(body: Any) -> None:
        reply = http.post(f"/leyline/v1/{path}", json=body)
        assert reply.status_code < 500 or reply.status_code == 501, reply.text
        if reply.status_code >= 400:
            assert reply.json()["error" if "error" in reply.json() else "message"]

    check()
    assert splice(http, append=[1, 2, 3])["version"] == 1


def test_a_restarted_server_is_met_with_a_typed_error_and_a_fresh_start() -> None:
    from leyline_client import LeylineSession
    from leyline_server_ext.embedded import EmbeddedServer

    messages: list[dict[str, Any]] = [{"role": "user", "content": "before the restart " * 10}]
    with EmbeddedServer("tiny-gqa", dtype="float32") as first:
        port, url = first.port, first.base_url
        session = LeylineSession(url)
        session.chat.completions.create(model="default", messages=messages, max_tokens=2)
    with EmbeddedServer("tiny-gqa", dtype="float32", port=port):
        messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and after"}]
        reply = session.chat.completions.create(model="default", messages=messages, max_tokens=2)
        assert reply.choices[0].message.role == "assistant"
        assert session.last is not None
        assert session.last.reason == "session_recovered"
        assert session.last.prefilled_tokens == session.last.prompt_tokens
    session.close()
