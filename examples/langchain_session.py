"""LangChain over a LeylineSession: ``python examples/langchain_session.py http://127.0.0.1:30000``."""

from __future__ import annotations

import sys
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from leyline_client import LeylineSession


@tool
def read_file(path: str) -> str:
    """Read a text file."""
    return Path(path).read_text()


def main(url: str, task: str) -> str:
    with LeylineSession(url, policies=["stale-tool-detector", "truncate-older-than-n:n=1"]) as session:
        client = session.openai
        model = ChatOpenAI(model="default", api_key="unused", root_client=client, client=client.chat.completions)
        agent = create_agent(model, [read_file], system_prompt="Answer from the files.")
        result = agent.invoke({"messages": [("user", task)]})
        print(f"{session.stats.turns} turns, {session.stats.cached_fraction:.0%} of the prompt tokens cached")
        return str(result["messages"][-1].content)


if __name__ == "__main__":
    print(main(sys.argv[1], "What does pyproject.toml say about the licence?"))
