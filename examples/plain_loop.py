"""A hand-written agent loop over a LeylineSession: ``python examples/plain_loop.py http://127.0.0.1:30000``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from leyline_client import LeylineSession

PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS: Any = [{"type": "function", "function": {"name": "read_file", "parameters": PATH}}]


def main(url: str, task: str) -> str:
    history: list[Any] = [{"role": "system", "content": "Answer from the files."}, {"role": "user", "content": task}]
    with LeylineSession(url, policies=["stale-tool-detector", "truncate-older-than-n:n=1"]) as session:
        while True:
            reply = session.chat.completions.create(model="default", messages=history, tools=TOOLS)
            message = reply.choices[0].message
            history.append(message)
            print(session.last)
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                arguments = json.loads(call.function.arguments) if call.type == "function" else {}
                output = Path(arguments["path"]).read_text()
                history.append({"role": "tool", "tool_call_id": call.id, "content": output})


if __name__ == "__main__":
    print(main(sys.argv[1], "What does pyproject.toml say about the licence?"))
