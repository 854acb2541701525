"""Agent frameworks run a tool loop through a session against a real server; its address is in ``LEYLINE_SERVER_URL``.

Started by ``tests/test_other_environments.py``: the embedded server runs in its own environment, with a tiny random
model and a grammar backend. Such a model never calls a tool of its own accord. Each framework therefore asks for the
tool in the first turns, by its own means (``tool_choice``, strict schemas), and the server's constrained decoding has
the model choose the arguments (white space is banned by ``logit_bias``: JSON may hold any amount of it, and a random
model may want nothing else). Everything else is as in any agent: the calls are parsed by the server, run by the
framework, and sent back in the framework's own words.
"""

from __future__ import annotations

import importlib
import itertools
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest

from leyline_client import AsyncLeylineSession, Executed, LeylineClient, LeylineSession, Receipt

URL = os.environ.get("LEYLINE_SERVER_URL", "")
EXAMPLES = Path(__file__).parents[2] / "examples"
POLICY = "truncate-older-than-n:n=1,max_chars=40"
MODEL = "default"
CALLS = 4
"""Turns in which the tool is asked for; in the next one the model answers as it likes."""
MAX_TOKENS = 120
"""A call takes 70 to 100 of the tiny model's one-byte tokens."""

pytestmark = pytest.mark.skipif(not URL, reason="LEYLINE_SERVER_URL is unset: tests/test_other_environments.py sets it")


@cache
def no_blanks() -> dict[str, int]:
    """The ``logit_bias`` that bans the tokens of single white space characters."""
    with LeylineClient(URL) as client:
        reply = client.render([{"role": "user", "content": "a b\nc\td\re"}])
    (span,) = reply.spans
    assert reply.token_ids is not None
    return {str(token): -100 for token in reply.token_ids[span.start : span.end][1::2]}


def lookup(key: Literal["alpha", "beta", "gamma"]) -> str:
    """Look a key up."""
    return f"value of {key}: " + "words " * 60


def check(session: AsyncLeylineSession | LeylineSession, answer: object) -> None:
    """The loop ran to its end in one conversation, its edits were spliced, and what was kept kept its cache."""
    receipts = session.receipts
    assert isinstance(answer, str)
    assert len(receipts) == CALLS + 1, answer
    assert not session.stats.reasons
    assert [r.executed for r in receipts].count(Executed.AMORTIZE) >= CALLS - 2
    # Nothing was refused or fell back. A call that the template writes with other blanks than the model is computed
    # again, which is a forget of what the model wrote.
    assert {r.executed for r in receipts} <= {Executed.APPEND, Executed.AMORTIZE, Executed.MIXED, Executed.FORGET}
    assert session.stats.rotated_tokens > 0
    for before, after in itertools.pairwise(receipts):
        assert_reuse(before, after)


def assert_reuse(before: Receipt, after: Receipt) -> None:
    """All that the turn before was shown is cached but what was evicted; what the reply lost is in the receipt."""
    evicted = sum(directive.end - directive.start for directive in after.directives)
    stubs = sum(directive.replacement_tokens for directive in after.directives)
    assert after.cached_tokens + stubs >= before.prompt_tokens - evicted, (before, after)
    assert after.drift_tokens <= MAX_TOKENS


@pytest.fixture(params=["reply", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "stream")


async def test_openai_agents(stream: bool) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    agents.set_tracing_disabled(True)
    calls: list[str] = []

    def counted(key: Literal["alpha", "beta", "gamma"]) -> str:
        """Look a key up."""
        calls.append(key)
        if len(calls) == CALLS:
            agent.model_settings = replace(agent.model_settings, tool_choice="auto")
        return lookup(key)

    async with AsyncLeylineSession(URL, policies=[POLICY]) as session:
        model = agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=session.openai)
        settings = agents.ModelSettings(
            tool_choice="lookup", max_tokens=MAX_TOKENS, temperature=0, extra_args={"logit_bias": no_blanks()}
        )
        tool = agents.function_tool(counted, name_override="lookup")
        agent = agents.Agent(
            name="a",
            instructions="Be brief.",
            tools=[tool],
            model=model,
            model_settings=settings,
            reset_tool_choice=False,
        )
        if stream:
            result = agents.Runner.run_streamed(agent, "Find it.")
            assert [event async for event in result.stream_events()]
        else:
            result = await agents.Runner.run(agent, "Find it.")
        assert len(calls) == CALLS
        check(session, result.final_output)


async def test_pydantic_ai(stream: bool) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")
    capabilities = importlib.import_module("pydantic_ai.capabilities")
    models = importlib.import_module("pydantic_ai.models.openai")
    providers = importlib.import_module("pydantic_ai.providers.openai")

    class AskForIt(capabilities.AbstractCapability):  # type: ignore[misc]
        def get_model_settings(self) -> Any:
            return lambda context: {"tool_choice": ["lookup"] if context.run_step <= CALLS else "auto"}

    async with AsyncLeylineSession(URL, policies=[POLICY]) as session:
        model = models.OpenAIChatModel(MODEL, provider=providers.OpenAIProvider(openai_client=session.openai))
        agent = pydantic_ai.Agent(
            model,
            instructions="Be brief.",
            tools=[pydantic_ai.Tool(lookup, strict=True)],
            model_settings={"max_tokens": MAX_TOKENS, "temperature": 0, "logit_bias": no_blanks()},
            capabilities=[AskForIt()],
        )
        # `run_stream` would take whatever a random model says beside its call for the answer.
        events: list[Any] = []

        async def note(_: Any, stream: Any) -> None:
            events.extend([event async for event in stream])

        result = await agent.run("Find it.", event_stream_handler=note if stream else None)
        assert bool(events) is stream
        check(session, result.output)


def test_langchain(stream: bool) -> None:
    openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    agents = pytest.importorskip("langchain.agents", reason="langchain is not installed")
    middleware = importlib.import_module("langchain.agents.middleware")

    @middleware.wrap_model_call
    def ask_for_it(request: Any, handler: Any) -> Any:
        called = sum(message.type == "tool" for message in request.messages)
        return handler(request.override(tool_choice="lookup" if called < CALLS else None))

    with LeylineSession(URL, policies=[POLICY]) as session:
        client = session.openai
        model = openai.ChatOpenAI(
            model=MODEL,
            api_key="x",
            root_client=client,
            client=client.chat.completions,
            streaming=stream,
            max_tokens=MAX_TOKENS,
            temperature=0,
            logit_bias=no_blanks(),
        )
        agent = agents.create_agent(
            model, [lookup], system_prompt="Be brief.", middleware=[ask_for_it, strict(middleware)]
        )
        result = agent.invoke({"messages": [("user", "Find it.")]})
        check(session, result["messages"][-1].content)


def strict(middleware: Any) -> Any:
    """LangChain's way to have arguments follow the schema: an argument of ``bind_tools``."""

    @middleware.wrap_model_call
    def with_strict(request: Any, handler: Any) -> Any:
        return handler(request.override(model_settings={**request.model_settings, "strict": True}))

    return with_strict


def steered(arguments: dict[str, Any]) -> dict[str, Any]:
    """What a model that can use tools would do itself: read the notes in the first turns."""
    tools = [
        {**tool, "function": {**tool["function"], "strict": True, "parameters": NOTES}}
        for tool in arguments.get("tools") or ()
    ]
    results = sum(dict(message).get("role") == "tool" for message in arguments["messages"])
    choice: Any = {"type": "function", "function": {"name": "read_file"}} if results < CALLS else "auto"
    forced = {"tools": tools, "tool_choice": choice, "logit_bias": no_blanks()}
    return {**arguments, **forced, "max_tokens": MAX_TOKENS, "temperature": 0}


NOTES = {
    "type": "object",
    "properties": {"path": {"type": "string", "enum": ["a.txt", "b.txt"]}},
    "required": ["path"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("module", "needs"),
    [
        ("openai_agents_session", "agents"),
        ("pydantic_ai_session", "pydantic_ai"),
        ("langchain_session", "langchain_openai"),
        ("plain_loop", "openai"),
    ],
)
async def test_the_examples_run(
    module: str, needs: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The examples as they are, over the real server; only what the model decides is decided for it."""
    pytest.importorskip(needs, reason=f"{needs} is not installed")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"{name} says: Apache-2.0. " * 30)
    sessions: list[Any] = []
    steer(monkeypatch, sessions)
    answer = importlib.import_module(module).main(URL, "Which licence?")
    assert isinstance(answer if isinstance(answer, str) else await answer, str)
    stats = sessions[0].stats
    assert stats.turns == CALLS + 1
    assert stats.edits > 0
    assert stats.rotated_tokens > 0
    assert not stats.reasons
    assert capsys.readouterr().out


def steer(monkeypatch: pytest.MonkeyPatch, sessions: list[Any]) -> None:
    sync, asynchronous = LeylineSession.take_turn, AsyncLeylineSession.take_turn

    def take_turn(self: LeylineSession, arguments: Any, key: str | None = None) -> Any:
        sessions.append(self)
        return sync(self, steered(arguments), key)

    async def take_turn_async(self: AsyncLeylineSession, arguments: Any, key: str | None = None) -> Any:
        sessions.append(self)
        return await asynchronous(self, steered(arguments), key)

    monkeypatch.setattr(LeylineSession, "take_turn", take_turn)
    monkeypatch.setattr(AsyncLeylineSession, "take_turn", take_turn_async)
