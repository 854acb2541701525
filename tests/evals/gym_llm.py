"""The seam to debug-gym's loop: faithful history, idempotent retries, odd replies, streaming.

Run in the debug-gym environment: ``pytest tests/evals/gym_*.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from leyline_evals.gym import _debug_gym as dg
from leyline_evals.gym.agent import LeylineAgent
from leyline_evals.gym.arms import UnknownArmError, openai_session
from leyline_evals.gym.env import make_env
from leyline_evals.gym.llm import ContextExceededError, LeylineLLM, ScriptedThroughServerLLM, ServerDownError
from leyline_evals.gym.replies import ReplyError
from leyline_evals.gym.script import Script, ScriptError, Step
from leyline_evals.gym.testing import FakeChatServer, StubbingSession

HISTORY = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    *(
        message
        for turn in range(3)
        for message in (
            {"role": "assistant", "content": "a", "tool_calls": [{"id": f"c{turn}", "type": "function"}]},
            {"role": "tool", "tool_call_id": f"c{turn}", "content": "long output"},
        )
    ),
]


def tool_call(name: str, arguments: str, call_id: str = "call_x") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*tool_calls: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(tool_calls)}


class InMemory:
    """A session whose replies are given; an exception among them is raised."""

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.requests: list[dict[str, Any]] = []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    def _create(self, **request: Any) -> Any:
        self.requests.append(json.loads(json.dumps(request)))
        request["messages"].clear()  # a careless session must not hurt the next attempt
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return {"choices": [{"index": 0, "message": reply}], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda _: None)


def refused() -> openai.APIConnectionError:
    return openai.APIConnectionError(request=httpx.Request("POST", "http://x"))


def status(code: int, message: str) -> openai.APIStatusError:
    response = httpx.Response(code, request=httpx.Request("POST", "http://x"))
    kind = openai.BadRequestError if code == 400 else openai.InternalServerError
    return kind(message, response=response, body=None)


def test_retries_send_the_same_request() -> None:
    session = InMemory(status(500, "busy"), refused(), {"role": "assistant", "content": "ok"})
    llm = LeylineLLM(session, request_options={"temperature": 0})
    llm(HISTORY, [])
    assert llm.attempts == 3
    assert session.requests == [session.requests[0]] * 3
    assert session.requests[0]["messages"] == HISTORY
    assert session.requests[0]["temperature"] == 0
    assert "max_tokens" not in session.requests[0]


def test_edits_are_planned_once_more_and_done_once() -> None:
    with FakeChatServer() as server:
        session = StubbingSession(server.url, "truncate+amortize")
        server.statuses = [500]
        llm = LeylineLLM(session)
        llm(HISTORY, [])
        llm(HISTORY, [])
        session.close()
        assert session.planned == [(3,), (3,), ()]
        assert session.done == {3}
        first, second, third = (body["messages"] for body in server.bodies)
        assert first == second == third
        assert [message["content"] for message in first if message["role"] == "tool"] == [
            "[cleared]",
            "long output",
            "long output",
        ]


@pytest.mark.parametrize("error", [refused(), httpx.ReadTimeout("late"), ConnectionResetError("gone")])
def test_an_unreachable_server_is_one_error(error: Exception) -> None:
    session = InMemory(error, error, error, {"role": "assistant", "content": "never asked"})
    with pytest.raises(ServerDownError, match=type(error).__name__):
        LeylineLLM(session)(HISTORY, [])
    assert len(session.requests) == 3


def test_a_clients_own_unreachable_error_counts() -> None:
    class ServerUnreachable(Exception):
        pass

    session = InMemory(*[ServerUnreachable("no route")] * 3)
    with pytest.raises(ServerDownError, match="no route"):
        LeylineLLM(session)(HISTORY, [])


def test_a_refused_request_is_not_repeated() -> None:
    session = InMemory(status(400, "bad tool"), {"role": "assistant", "content": "never asked"})
    with pytest.raises(openai.BadRequestError, match="bad tool"):
        LeylineLLM(session)(HISTORY, [])
    assert len(session.requests) == 1


def test_a_prompt_that_does_not_fit_is_said_so() -> None:
    session = InMemory(status(400, "This model's maximum context length is 8192 tokens."))
    with pytest.raises(ContextExceededError):
        LeylineLLM(session)(HISTORY, [])
    assert len(session.requests) == 1


def test_a_reply_without_choices_is_an_error() -> None:
    session = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=lambda **_: {"choices": []})))
    with pytest.raises(ReplyError, match="no choices"):
        LeylineLLM(session)(HISTORY, [])
    session.chat.completions.create = lambda **_: "text"
    with pytest.raises(ReplyError, match="not str"):
        LeylineLLM(session)(HISTORY, [])


@pytest.fixture
def run_agent(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    # Without the eval tool a reset runs no tests, which is most of its time; a test that needs it adds it.
    env = make_env("purr", tmp_path, tools=("view", "bash", "edit"))

    def run(
        *replies: dict[str, Any],
        max_steps: int = 10,
        llm: Callable[[Any], LeylineLLM] = LeylineLLM,
        evaluates: bool = False,
    ) -> Any:
        if evaluates:
            env.add_tool(dg.Toolbox.get_tool("eval"))
        session = InMemory(*replies)
        steps: list[dict[str, Any]] = []
        agent = LeylineAgent(llm(session), max_steps, steps.append)
        return agent.run(env), agent, session, steps

    yield run
    env.close()


def test_history_is_replayed_byte_for_byte(run_agent: Callable[..., Any]) -> None:
    arguments = '{"path":   "purr_code.py",\n"start": 1, "end": 2}'
    thinking = {**calls(tool_call("view", arguments, "call_1")), "reasoning_content": "hm", "refusal": None}
    outcome, _, session, _ = run_agent(
        thinking, calls(tool_call("bash", '{"command": "echo \u00e9"}', "call_2"), content="Say."), max_steps=2
    )
    assert outcome["ended"] == "max_steps"
    assert outcome["turns"] == 2
    replayed = session.requests[1]["messages"][2]
    assert replayed == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [tool_call("view", arguments, "call_1")],
    }


def test_prompt_only_grows_and_its_beginning_is_static(run_agent: Callable[..., Any]) -> None:
    evaluate = calls(tool_call("eval", "{}", "call_1"))
    _, agent, session, steps = run_agent(evaluate, evaluate, evaluate, max_steps=3, evaluates=True)
    assert [len(request["messages"]) for request in session.requests] == [2, 4, 6]
    for request in session.requests:
        assert agent.messages[: len(request["messages"])] == request["messages"]
    assert session.requests[0]["tools"] == session.requests[2]["tools"]
    assert [step["turn"] for step in steps] == [0, 1, 2]
    assert "collected" not in session.requests[0]["messages"][0]["content"]


def test_only_the_first_call_is_made_and_kept(run_agent: Callable[..., Any]) -> None:
    two = calls(tool_call("bash", '{"command": "echo one"}', "a"), tool_call("bash", '{"command": "echo two"}', "b"))
    _, agent, _, _ = run_agent(two, max_steps=1)
    assert [call["id"] for call in agent.messages[2]["tool_calls"]] == ["a"]
    assert agent.messages[3] == {"role": "tool", "tool_call_id": "a", "name": "bash", "content": "one"}


def test_broken_arguments_are_told_to_the_model(run_agent: Callable[..., Any]) -> None:
    _, agent, session, _ = run_agent(calls(tool_call("bash", '{"command": ', "a")), max_steps=1)
    assert agent.messages[3]["name"] == "bash"
    assert "were not a JSON object" in agent.messages[3]["content"]
    assert len(session.requests) == 1


def test_a_turn_without_a_call_gets_a_user_message(run_agent: Callable[..., Any]) -> None:
    _, agent, _, steps = run_agent({"role": "assistant", "content": "I think it is solved."}, max_steps=1)
    assert agent.messages[2] == {"role": "assistant", "content": "I think it is solved."}
    assert agent.messages[3]["role"] == "user"
    assert "No tool call" in agent.messages[3]["content"]
    assert steps[0]["tool"] == "empty_tool_response"


def test_unknown_tools_and_arguments_do_not_end_the_run(run_agent: Callable[..., Any]) -> None:
    _, agent, _, _ = run_agent(
        calls(tool_call("fly", "{}", "a")), calls(tool_call("view", '{"nonsense": 1}', "b")), max_steps=2
    )
    assert agent.messages[3]["content"] == "Unregistered tool: fly"
    assert "nonsense" in agent.messages[5]["content"]


def test_solving_ends_the_run(run_agent: Callable[..., Any]) -> None:
    fix = {"path": "purr_code.py", "start": 27, "end": 27, "new_code": "        if 10 < self.hunger <= 20:"}
    outcome, _, session, _ = run_agent(
        calls(tool_call("edit", json.dumps(fix), "a")), calls(tool_call("eval", "{}", "b")), max_steps=9, evaluates=True
    )
    assert outcome == {"resolved": True, "score": 1, "max_score": 1, "turns": 2, "ended": "terminated"}
    assert len(session.requests) == 2


def test_scripted_llm_acts_by_the_script_and_asks_the_server(run_agent: Callable[..., Any]) -> None:
    script = Script(
        "purr", (Step("Look.", "bash", {"command": "echo script"}), Step("Again.", "view", {"path": "test.py"}))
    )
    server_says = calls(tool_call("bash", '{"command": "echo server"}'), content="Server.")
    outcome, agent, session, _ = run_agent(
        server_says, server_says, max_steps=2, llm=lambda session: ScriptedThroughServerLLM(session, script)
    )
    assert outcome["turns"] == 2
    assert [message["content"] for message in agent.messages[2:4]] == ["Look.", "script"]
    assert session.requests[1]["messages"][2] == script.assistant_message(0)
    assert [request["max_tokens"] for request in session.requests] == [1, 1]


def test_scripted_llm_repeats_a_turn_and_never_invents_one() -> None:
    script = Script("purr", (Step("Look.", "eval", {}),))
    llm = ScriptedThroughServerLLM(InMemory(*[{"role": "assistant", "content": "x"}] * 2), script)
    assert llm(HISTORY[:2], []).tool == llm(HISTORY[:2], []).tool == dg.ToolCall(script.call_id(0), "eval", {})
    with pytest.raises(ScriptError, match="ends after 3 steps"):
        llm(HISTORY, [])


@pytest.mark.parametrize("stream", [False, True])
def test_streamed_and_whole_replies_are_the_same(stream: bool) -> None:
    message = calls(tool_call("bash", '{"command": "ls"}', "call_9"), content="Let me look.")
    with FakeChatServer(lambda _: message) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        llm = LeylineLLM(client, stream=stream)
        response = llm(HISTORY, [])
        client.close()
        assert response.message == message
        assert response.tool == dg.ToolCall("call_9", "bash", {"command": "ls"})
        assert response.token_usage.prompt == len(json.dumps(HISTORY)) // 4
        assert llm.last_reply is not None
        assert llm.last_reply.body["leyline"]["version"] == 1
        assert bool(server.bodies[0].get("stream")) is stream
        if stream:
            assert llm.last_reply.ttft_ms is not None
            assert 0 < llm.last_reply.ttft_ms <= llm.last_reply.total_ms
        else:
            assert llm.last_reply.ttft_ms is None


def test_every_plain_session_has_a_salt_of_its_own() -> None:
    with FakeChatServer() as server:
        for _ in range(2):
            session = openai_session(server.url, "keep-all", 0)
            LeylineLLM(session)(HISTORY, [])
            LeylineLLM(session)(HISTORY, [])
            session.close()
        salts = [body["cache_salt"] for body in server.bodies]
    assert salts[0] == salts[1] != salts[2] == salts[3]
    with pytest.raises(UnknownArmError, match="plain OpenAI client"):
        openai_session("http://x", "truncate+forget", 0)
