"""The wire contract on the running server: isolation, bad input, sessions, chat and streaming."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("sglang", reason="needs the server environment")

pytestmark = [pytest.mark.server, pytest.mark.slow]


class Api:
    """The token-level and chat routes, and SGLang's own, of one server."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=120)

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(f"/leyline/v1/{path}", json=body)

    def splice(self, **body: Any) -> dict[str, Any]:
        body.setdefault("sampling_params", {"max_new_tokens": 1})
        reply = self.post("splice", body)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def generate(self, ids: list[int], **more: Any) -> dict[str, Any]:
        body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 1}, **more}
        reply = self.http.post("/generate", json=body)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def cached(self, ids: list[int], **more: Any) -> int:
        return int(self.generate(ids, **more)["meta_info"]["cached_tokens"])

    def pool(self) -> dict[str, int]:
        """Pool counts, read off the receipt of a one-token turn that adds nothing to the cache."""
        self.splice(append=[1])
        reply = self.splice(append=[1])
        return dict(reply["receipt"]["pool_before"])


@pytest.fixture(scope="module", params=["tiny-mla", "tiny-gqa"])
def api(request: pytest.FixtureRequest) -> Iterator[Api]:
    running = request.getfixturevalue(f"server_{request.param.replace('-', '_')}")
    client = Api(running.base_url)
    try:
        yield client
    finally:
        client.http.close()


def tokens(seed: str, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 250), k=count)


def test_a_clean_request_never_reaches_spliced_kv(api: Api) -> None:
    prompt, tail = tokens("isolation", 200), tokens("isolation tail", 5)
    first = api.splice(append=prompt)
    spliced = api.splice(session=first["session"], directives=[{"start": 80, "end": 120}], append=tail)
    target = (prompt + first["output_ids"])[:80] + (prompt + first["output_ids"])[120:] + tail
    assert spliced["receipt"]["rotated_tokens"] == 80
    clean = api.generate(target, return_logprob=True, top_logprobs_num=1)
    assert clean["meta_info"]["cached_tokens"] == 80, "only the common prefix may be shared"
    fresh = api.generate(target, cache_salt="another", return_logprob=True, top_logprobs_num=1)
    assert fresh["meta_info"]["cached_tokens"] == 0
    assert clean["output_ids"] == fresh["output_ids"]
    logprob = [reply["meta_info"]["output_top_logprobs"][0][0][0] for reply in (clean, fresh)]
    assert logprob[0] == pytest.approx(logprob[1], abs=1e-5)


def test_other_evicted_text_with_the_same_target_shares_nothing(api: Api) -> None:
    head, tail = tokens("head", 60), tokens("kept", 90)
    middles = tokens("evicted one", 30), tokens("evicted two", 30)
    rotated = []
    for middle in middles:
        first = api.splice(append=head + middle + tail)
        # The generated token differs with the evicted text; cut it off so that the targets are the same.
        end = 60 + 30 + 90
        edits = [{"start": 60, "end": 90}, {"start": end, "end": end + 1}]
        reply = api.splice(session=first["session"], directives=edits, append=[5, 6])
        rotated.append(reply["receipt"]["rotated_tokens"])
    assert rotated == [90, 90], "the second history must not find the first one's spliced KV"


def test_identical_edits_of_identical_text_share(api: Api) -> None:
    prompt = tokens("shared edit", 150)
    receipts = []
    for _ in range(2):
        first = api.splice(append=prompt)
        edits = {"directives": [{"start": 20, "end": 50}], "append": [9, 9], "keep_source": True}
        receipts.append(api.splice(session=first["session"], **edits)["receipt"])
    assert [r["slots_allocated"] for r in receipts] == [100, 0], "the second one finds what the first one spliced"
    assert receipts[1]["prefilled_tokens"] <= receipts[0]["prefilled_tokens"]


BAD_SPLICES: list[tuple[dict[str, Any], int, str, str]] = [
    ({"directives": [{"start": -1, "end": 3}]}, 422, "invalid_request", "directives[0].start"),
    ({"directives": [{"start": 5, "end": 3}]}, 422, "invalid_request", "directives[0]"),
    ({"directives": [{"start": 5, "end": 5}]}, 422, "invalid_request", "directives[0]"),
    ({"directives": [{"start": True, "end": 3}]}, 422, "invalid_request", "directives[0].start"),
    ({"directives": [{"start": 1.0, "end": 3}]}, 422, "invalid_request", "directives[0].start"),
    ({"directives": [{"start": 1, "end": 3, "mode": "maybe"}]}, 422, "invalid_request", "directives[0].mode"),
    ({"directives": [{"start": 1, "end": 3, "x": 1}]}, 422, "invalid_request", "directives[0].x"),
    ({"directives": [{"start": 1, "end": 10**9}]}, 422, "invalid_request", "directives[0].end"),
    ({"directives": [{"start": 1, "end": 9000}]}, 422, "invalid_directive", "directives[0].end"),
    (
        {"directives": [{"start": 1, "end": 9}, {"start": 5, "end": 12}]},
        422,
        "invalid_directive",
        "directives[1].start",
    ),
    ({"directives": [{"start": 1, "end": 2}] * 2000}, 422, "invalid_request", "directives"),
    ({"directives": [{"start": 0, "end": 1, "replacement": [1] * 70_000}]}, 422, "invalid_request", "directives"),
    ({"append": [1 << 30]}, 422, "invalid_request", "append[0]"),
    ({"append": [None]}, 422, "invalid_request", "append[0]"),
    ({"append": [5] * 9000}, 422, "invalid_request", "append"),
    ({"append": [9, 4000]}, 422, "invalid_request", "append"),
    ({"directives": [{"start": 0, "end": 1, "replacement": [4000]}]}, 422, "invalid_request", "directives[0].repl"),
    ({"session": "no-such-session-at-all"}, 404, "unknown_session", "leyline.session"),
    ({"session": 7}, 422, "invalid_request", "session"),
    ({"expected_version": 99, "append": [1]}, 409, "version_conflict", "leyline.expected_version"),
    ({"sampling_params": {"temperature": -3}, "append": [1]}, 422, "invalid_request", "sampling_params"),
    ({"sampling_params": {"no_such": 1}, "append": [1]}, 422, "invalid_request", "sampling_params"),
]


@pytest.mark.parametrize(("body", "status", "code", "param"), BAD_SPLICES, ids=lambda value: str(value)[:40])
def test_bad_input_is_refused_and_names_the_field(
    api: Api, body: dict[str, Any], status: int, code: str, param: str
) -> None:
    session = api.splice(append=tokens("bad input", 40))["session"]
    before = api.pool()
    reply = api.post("splice", {"session": session, **body})
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["code"] == code
    assert error["param"].startswith(param)
    after = api.pool()
    assert after == before, "a refused request changed the pool"


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'"x"'])
def test_a_body_that_is_no_json_object_is_refused(api: Api, raw: bytes) -> None:
    reply = api.http.post("/leyline/v1/splice", content=raw)
    assert reply.status_code == 422
    assert reply.json()["error"]["code"] == "invalid_request"


def test_forged_lineages_and_orders_are_refused_on_the_engine_s_own_routes(api: Api) -> None:
    for more in (
        {"extra_key": "leyline:eyJsIjpbXSwidSI6MH0=.00000000000000000000000000000000|"},
        {"extra_key": "leyline:"},
        {"sampling_params": {"max_new_tokens": 1, "custom_params": {"leyline": "e30=.00"}}},
        {"sampling_params": {"max_new_tokens": 1, "custom_params": {"leyline": {"x": 1}}}},
    ):
        reply = api.http.post("/generate", json={"input_ids": [1, 2, 3], **more})
        assert reply.status_code == 400, reply.text
    assert api.generate([1, 2, 3])["output_ids"]


def test_a_session_is_unknown_under_another_salt(api: Api) -> None:
    session = api.splice(append=tokens("salted", 30), cache_salt="mine")["session"]
    assert api.post("splice", {"session": session, "append": [1]}).status_code == 404
    assert api.post("splice", {"session": session, "append": [1], "cache_salt": "other"}).status_code == 404
    assert api.post("splice", {"session": session, "append": [1], "cache_salt": "mine"}).status_code == 200


def test_forget_equals_a_server_that_never_saw_the_span(api: Api) -> None:
    prompt, tail = tokens("forget", 180), tokens("forget tail", 6)
    first = api.splice(append=prompt)
    source = prompt + first["output_ids"]
    body = {"directives": [{"start": 40, "end": 70, "mode": "forget"}], "append": tail}
    reply = api.splice(session=first["session"], return_logprob=True, top_logprobs_num=5, **body)
    receipt = reply["receipt"]
    assert receipt["executed"] == "forget"
    assert receipt["cached_tokens"] == 40
    assert receipt["influenced_tokens"] == 0
    assert receipt["dropped_tokens"] + receipt["kept_by_others"] == len(source) - 1 - 40
    assert receipt["kept_by_others"] == 0
    never = api.generate(source[:40] + source[70:] + tail, cache_salt="never", return_logprob=True, top_logprobs_num=5)
    ours, theirs = reply["meta"]["output_top_logprobs"][0], never["meta_info"]["output_top_logprobs"][0]
    assert [entry[1] for entry in ours] == [entry[1] for entry in theirs]
    assert [e[0] for e in ours] == pytest.approx([e[0] for e in theirs], abs=1e-4)
    assert api.cached(source[:75]) == 40, "nothing that holds the span may be left in the cache"


def test_undo_restores_the_earlier_view_without_prefill(api: Api) -> None:
    prompt = tokens("undo", 160)
    first = api.splice(append=prompt)
    edit = {"directives": [{"start": 30, "end": 60}], "append": [8, 8, 8], "keep_source": True}
    edited = api.splice(session=first["session"], **edit)
    back = api.post(f"sessions/{first['session']}/undo", {"expected_version": edited["version"]})
    assert back.status_code == 200, back.text
    # The edited view's own KV (all from the edit on, but for the last token, which was never fed back) is gone with it.
    assert back.json()["receipt"]["dropped_tokens"] == edited["receipt"]["prompt_tokens"] - 30
    again = api.splice(session=first["session"], append=[7, 7])
    assert again["receipt"]["prefilled_tokens"] == 3
    assert again["receipt"]["influenced_tokens"] == 0
    assert api.post(f"sessions/{first['session']}/undo", {}).json()["error"]["code"] == "nothing_to_undo"


def test_purge_drops_everything_that_carries_evicted_influence(api: Api) -> None:
    prompt = tokens("purge", 160)
    first = api.splice(append=prompt)
    api.splice(session=first["session"], directives=[{"start": 30, "end": 60}], append=[8, 8, 8])
    view = api.http.get(f"/leyline/v1/sessions/{first['session']}").json()
    assert view["influenced_tokens"] > 0
    purged = api.post(f"sessions/{first['session']}/purge", {}).json()
    assert purged["receipt"]["dropped_tokens"] > 90
    assert api.http.get(f"/leyline/v1/sessions/{first['session']}").json()["influenced_tokens"] == 0
    again = api.splice(session=first["session"], append=[4])
    assert again["receipt"]["cached_tokens"] == 30


def test_ending_a_session_gives_its_spliced_kv_back(api: Api) -> None:
    prompt = tokens("ending", 300)
    before = api.pool()
    first = api.splice(append=prompt)
    api.splice(session=first["session"], directives=[{"start": 2, "end": 50}], append=[8, 8, 8])
    assert api.http.delete(f"/leyline/v1/sessions/{first['session']}").status_code == 204
    after = api.pool()
    assert after["free"] >= before["free"] - 10
    assert api.http.get(f"/leyline/v1/sessions/{first['session']}").status_code == 404


MESSAGES = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "List the files."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "ls", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "a", "content": "alpha.py beta.py gamma.py " * 8},
    {"role": "assistant", "content": "Three files, many times over, as the listing shows."},
    {"role": "user", "content": "And now?"},
]


def chat(api: Api, messages: list[dict[str, Any]], leyline: dict[str, Any], **more: Any) -> dict[str, Any]:
    body = {"model": "default", "messages": messages, "max_tokens": 3, "temperature": 0, "leyline": leyline, **more}
    reply = api.post("chat/completions", body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_chat_edits_are_spliced_and_retries_are_idempotent(api: Api) -> None:
    first = chat(api, MESSAGES, {})
    session = first["leyline"]["session"]
    assert first["choices"][0]["message"]["role"] == "assistant"
    reply = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    longer = [*MESSAGES, reply, {"role": "user", "content": "Go on."}]
    edits = [{"message": 3, "replacement": "[old listing]"}]
    second = chat(api, longer, {"session": session, "edits": edits, "expected_version": 1})
    receipt = second["leyline"]["receipt"]
    assert receipt["executed"] == "amortize", receipt
    assert receipt["rotated_tokens"] > 50
    assert receipt["directives"][0]["declared"] is True
    assert receipt["cached_tokens"] > receipt["prefilled_tokens"]
    # The same turn again (a lost reply): nothing is edited twice, nothing is prefilled twice.
    again = chat(api, longer, {"session": session, "edits": edits})
    assert again["leyline"]["receipt"]["rotated_tokens"] == 0
    assert again["leyline"]["receipt"]["prefilled_tokens"] == 1
    assert again["choices"][0]["message"]["content"] == second["choices"][0]["message"]["content"]


def test_an_undeclared_change_gets_on_history_edit(api: Api) -> None:
    for mode, executed in (("forget", "forget"), ("amortize", "amortize")):
        messages = [{**MESSAGES[0], "content": f"You are terse ({mode})."}, *MESSAGES[1:]]
        session = chat(api, messages, {})["leyline"]["session"]
        changed = [*messages[:3], {**messages[3], "content": "gone"}, *messages[4:]]
        refused = api.post(
            "chat/completions",
            {"model": "d", "messages": changed, "leyline": {"session": session, "on_history_edit": "error"}},
        )
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "history_edited"
        receipt = chat(api, changed, {"session": session, "on_history_edit": mode})["leyline"]["receipt"]
        assert receipt["executed"] == executed
        assert receipt["directives"][0]["declared"] is False


def test_mixed_modes_follow_the_edit_they_lie_in(api: Api) -> None:
    messages = [
        {"role": "system", "content": "Mixed modes."},
        {"role": "user", "content": "one " * 30},
        {"role": "assistant", "content": "A first answer of some length, kept by everybody."},
        {"role": "user", "content": "two " * 30},
        {"role": "assistant", "content": "A second answer of some length, kept by everybody."},
        {"role": "user", "content": "three"},
    ]
    session = chat(api, messages, {})["leyline"]["session"]
    edits = [
        {"message": 1, "replacement": "[dropped]", "mode": "amortize"},
        {"message": 3, "replacement": "[secret]", "mode": "forget"},
    ]
    receipt = chat(api, messages, {"session": session, "edits": edits})["leyline"]["receipt"]
    assert receipt["executed"] == "mixed", receipt
    assert [directive["mode"] for directive in receipt["directives"]] == ["amortize", "forget"]
    assert receipt["rotated_tokens"] > 0


def test_streaming_ends_with_the_receipt(api: Api) -> None:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "stream please"}],
        "stream": True,
        "max_tokens": 4,
        "leyline": {},
    }
    with api.http.stream("POST", "/leyline/v1/chat/completions", json=body) as reply:
        assert reply.status_code == 200
        events = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    assert last["choices"] == []
    assert last["leyline"]["version"] == 1
    assert last["leyline"]["receipt"]["prompt_tokens"] > 0
    assert api.http.get(f"/leyline/v1/sessions/{last['leyline']['session']}").json()["version"] == 1


def test_bad_edits_are_refused(api: Api) -> None:
    for edits, code, param in (
        ([{"message": 99}], "invalid_edit", "leyline.edits[0].message"),
        ([{"message": 3, "start": 5, "end": 9999}], "invalid_edit", "leyline.edits[0].end"),
        ([{"message": 2, "part": "content"}], "invalid_edit", "leyline.edits[0].part"),
        ([{"message": True}], "invalid_request", "leyline.edits[0].message"),
    ):
        reply = api.post("chat/completions", {"model": "d", "messages": MESSAGES, "leyline": {"edits": edits}})
        assert reply.status_code == 422, reply.text
        assert reply.json()["error"]["code"] == code
        assert reply.json()["error"]["param"] == param


def test_render_says_where_each_text_is(api: Api) -> None:
    reply = api.post("render", {"messages": MESSAGES}).json()
    ids = reply["token_ids"]
    assert len(ids) == reply["prompt_tokens"]
    assert reply["exact"]
    by_message = {span["message"]: span for span in reply["spans"] if span["part"] == "content"}
    assert set(by_message) == {0, 1, 3, 4, 5}
    for index, span in by_message.items():
        assert span["end"] - span["start"] == len(MESSAGES[index]["content"]), "one token per byte here"


def test_plan_predicts_and_changes_nothing(api: Api) -> None:
    first = api.splice(append=tokens("plan", 200))
    edits = {"directives": [{"start": 20, "end": 120}], "append": [3, 4]}
    plan = api.post("plan", {"session": first["session"], **edits}).json()
    assert plan["worth_it"]
    real = api.splice(session=first["session"], **edits)["receipt"]
    for name in ("executed", "prompt_tokens", "cached_tokens", "rotated_tokens", "prefilled_tokens"):
        assert plan["receipt"][name] == real[name], name


def test_an_edit_that_does_not_pay_is_vetoed_where_asked(api: Api) -> None:
    messages = [*MESSAGES[:3], {**MESSAGES[3], "content": "veto listing " * 20}, *MESSAGES[4:]]
    session = chat(api, messages, {})["leyline"]["session"]
    longer = [{"message": 3, "replacement": "x" * 400}]
    options = {"session": session, "edits": longer, "veto_unprofitable": True}
    receipt = chat(api, messages, options)["leyline"]["receipt"]
    assert receipt["reason"] == "vetoed"
    assert receipt["executed"] == "append"
    assert receipt["directives"] == []
    shorter = [{"message": 3, "replacement": "[old]"}]
    receipt = chat(api, messages, {**options, "edits": shorter})["leyline"]["receipt"]
    assert receipt["executed"] == "amortize", receipt
