"""The served model's vocabulary, for clients that count tokens without asking: a byte-level BPE, or nothing.

What is given out is only what counts depend on (see `leyline_client.policy._bpe.essence`), named by its SHA-256.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from leyline_client._errors import ConfigurationError, InvalidRequest, Unsupported
from leyline_client._wire import TokenizerInfo
from leyline_client.policy._bpe import essence


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """One vocabulary as it travels, and its description."""

    content: bytes
    info: TokenizerInfo


class Vocabularies:
    """The vocabulary of the one tokenizer a server has, read when it is first asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._reading: asyncio.Task[Vocabulary] | None = None

    async def info(self) -> TokenizerInfo:
        """``GET tokenizer``. Raises `Unsupported` where there is no byte-level BPE."""
        return (await self._read()).info

    async def content(self, digest: str) -> bytes:
        """``GET tokenizer/{digest}``. Raises `InvalidRequest` for another digest than `info` says."""
        found = await self._read()
        if digest != found.info.digest:
            raise InvalidRequest("the server counts with another vocabulary", param="digest")
        return found.content

    async def _read(self) -> Vocabulary:
        # One reading however many ask; in a thread, because writing a large vocabulary out takes a while. Shielded:
        # a client that goes away must not take it from the others.
        if self._reading is None:
            self._reading = asyncio.create_task(asyncio.to_thread(read, self._tokenizer))
        return await asyncio.shield(self._reading)


def read(tokenizer: Any) -> Vocabulary:
    """The vocabulary of a transformers tokenizer.

    Raises:
        Unsupported: it is no fast tokenizer, or no byte-level BPE that a client can reproduce.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _refusal("the served tokenizer is not one of the tokenizers library")
    try:
        content = essence(json.loads(backend.to_str()))
    except ConfigurationError as error:
        raise _refusal(str(error)) from None
    digest = hashlib.sha256(content).hexdigest()
    return Vocabulary(content, TokenizerInfo(digest=digest, size=len(content)))


def _refusal(why: str) -> Unsupported:
    return Unsupported(f"token counts are only known to the server: {why}", detail={"reason": "tokenizer"})
