"""Agent frameworks, each with its own loop, over a session (their client is ``session.openai``).

Needs ``requirements/frameworks.txt``; whichever is missing is skipped and says so.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from leyline_client import AsyncLeylineSession, Executed, LeylineSession
from leyline_client.testing import FakeServer, tool_call

ROOT = Path(__file__).parents[2]
STEPS: list[Any] = [
    {"tool_calls": [tool_call("lookup", '{"key":  "a"}', "c1")]},
    {"tool_calls": [tool_call("lookup", '{"key":  "b"}', "c2"), tool_call("lookup", '{"key":  "c"}', "c3")]},
    {"tool_calls": [tool_call("lookup", '{"key":  "d"}', "c4")]},
    "The answer is 42.",
]
POLICY = "truncate-older-than-n:n=1,max_chars=20"


def lookup(key: str) -> str:
    """Look a key up."""
    return f"value of {key}: " + "words " * 40


def check(server: FakeServer, session: Any, answer: str) -> None:
    """The loop ran to its end in one conversation, edits were spliced, and no kept token lost its cache."""
    assert answer == "The answer is 42."
    assert session.stats.turns == 4
    assert len({turn.body["leyline"]["session"] for turn in server.turns[1:]}) == 1
    assert Executed.AMORTIZE in session.stats.executed
    assert set(session.stats.executed) <= {Executed.APPEND, Executed.AMORTIZE}
    assert session.stats.drift_tokens == 0
    assert session.stats.edits >= 1
    truncated = [m for m in server.turns[-1].messages if m["role"] == "tool" and len(m["content"]) < 100]
    assert len(truncated) >= 1


@pytest.mark.parametrize("stream", [False, True], ids=["reply", "stream"])
async def test_openai_agents(stream: bool) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    agents.set_tracing_disabled(True)
    with FakeServer(STEPS) as server:
        async with AsyncLeylineSession("http://fake", policies=[POLICY], transport=server.async_transport) as session:
            model = agents.OpenAIChatCompletionsModel(model="m", openai_client=session.openai)
            agent = agents.Agent(name="a", instructions="Be brief.", tools=[agents.function_tool(lookup)], model=model)
            if stream:
                result = agents.Runner.run_streamed(agent, "Find it.")
                events = [event async for event in result.stream_events()]
                assert events
            else:
                result = await agents.Runner.run(agent, "Find it.")
            check(server, session, result.final_output)


@pytest.mark.parametrize("stream", [False, True], ids=["reply", "stream"])
async def test_pydantic_ai(stream: bool) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")
    models = importlib.import_module("pydantic_ai.models.openai")
    providers = importlib.import_module("pydantic_ai.providers.openai")
    with FakeServer(STEPS) as server:
        async with AsyncLeylineSession("http://fake", policies=[POLICY], transport=server.async_transport) as session:
            model = models.OpenAIChatModel("m", provider=providers.OpenAIProvider(openai_client=session.openai))
            agent = pydantic_ai.Agent(model, instructions="Be brief.", tools=[lookup])
            if stream:
                async with agent.run_stream("Find it.") as result:
                    answer = await result.get_output()
            else:
                answer = (await agent.run("Find it.")).output
            check(server, session, answer)


@pytest.mark.parametrize("stream", [False, True], ids=["reply", "stream"])
def test_langchain(stream: bool) -> None:
    openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    agents = pytest.importorskip("langchain.agents", reason="langchain is not installed")
    with (
        FakeServer(STEPS) as server,
        LeylineSession("http://fake", policies=[POLICY], transport=server.transport) as session,
    ):
        client = session.openai
        model = openai.ChatOpenAI(
            model="m", api_key="x", root_client=client, client=client.chat.completions, streaming=stream
        )
        agent = agents.create_agent(model, [lookup], system_prompt="Be brief.")
        result = agent.invoke({"messages": [("user", "Find it.")]})
        check(server, session, result["messages"][-1].content)


@pytest.mark.parametrize(
    ("module", "needs"),
    [
        ("openai_agents_session", "agents"),
        ("pydantic_ai_session", "pydantic_ai"),
        ("langchain_session", "langchain_openai"),
        ("plain_loop", "openai"),
    ],
)
async def test_the_examples_run_and_are_short(
    module: str, needs: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip(needs, reason=f"{needs} is not installed")
    path = ROOT / "examples" / f"{module}.py"
    assert len(path.read_text().splitlines()) < 40
    monkeypatch.syspath_prepend(str(path.parent))
    notes = tmp_path / "notes.txt"
    notes.write_text("Apache-2.0 " * 100)
    arguments = {"path": str(notes)}
    steps = [{"tool_calls": [tool_call("read_file", arguments, f"c{number}")]} for number in range(4)]
    with FakeServer([*steps, "Apache-2.0"]).serve() as url:
        answer = importlib.import_module(module).main(url, "Which licence?")
        assert (answer if isinstance(answer, str) else await answer) == "Apache-2.0"
    sys.modules.pop(module)


async def test_the_streaming_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai", reason="openai is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    with FakeServer(["one", "two"]).serve() as url:
        assert sorted(await importlib.import_module("async_streaming").main(url)) == ["one", "two"]
