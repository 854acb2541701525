"""OpenAI Agents SDK over a LeylineSession: ``python examples/openai_agents_session.py http://127.0.0.1:30000``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

from leyline_client import AsyncLeylineSession


@function_tool
def read_file(path: str) -> str:
    """Read a text file."""
    return Path(path).read_text()


async def main(url: str, task: str) -> str:
    set_tracing_disabled(True)
    async with AsyncLeylineSession(url, policies=["stale-tool-detector", "truncate-older-than-n:n=1"]) as session:
        model = OpenAIChatCompletionsModel(model="default", openai_client=session.openai)
        agent = Agent(name="reader", instructions="Answer from the files.", tools=[read_file], model=model)
        result = await Runner.run(agent, task)
        print(f"{session.stats.turns} turns, {session.stats.cached_fraction:.0%} of the prompt tokens cached")
        return str(result.final_output)


if __name__ == "__main__":
    print(asyncio.run(main(sys.argv[1], "What does pyproject.toml say about the licence?")))
