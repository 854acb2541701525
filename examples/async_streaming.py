"""Two streamed conversations at once: ``python examples/async_streaming.py http://127.0.0.1:30000``."""

from __future__ import annotations

import asyncio
import sys

from leyline_client import AsyncLeylineSession, leyline_of


async def ask(session: AsyncLeylineSession, name: str, question: str) -> str:
    stream = await session.conversation(name).chat.completions.create(
        model="default", messages=[{"role": "user", "content": question}], stream=True
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    print(f"{name}: {leyline_of(stream).receipt.prefilled_tokens} tokens prefilled")
    return text


async def main(url: str) -> list[str]:
    async with AsyncLeylineSession(url) as session:
        return await asyncio.gather(ask(session, "a", "Who are you?"), ask(session, "b", "What is a radix tree?"))


if __name__ == "__main__":
    print(*asyncio.run(main(sys.argv[1])), sep="\n\n")
