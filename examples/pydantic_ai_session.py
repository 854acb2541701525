"""pydantic-ai over a LeylineSession: ``python examples/pydantic_ai_session.py http://127.0.0.1:30000``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from leyline_client import AsyncLeylineSession


def read_file(path: str) -> str:
    """Read a text file."""
    return Path(path).read_text()


async def main(url: str, task: str) -> str:
    async with AsyncLeylineSession(url, policies=["stale-tool-detector", "truncate-older-than-n:n=1"]) as session:
        model = OpenAIChatModel("default", provider=OpenAIProvider(openai_client=session.openai))
        agent = Agent(model, instructions="Answer from the files.", tools=[read_file])
        result = await agent.run(task)
        print(f"{session.stats.turns} turns, {session.stats.cached_fraction:.0%} of the prompt tokens cached")
        return result.output


if __name__ == "__main__":
    print(asyncio.run(main(sys.argv[1], "What does pyproject.toml say about the licence?")))
