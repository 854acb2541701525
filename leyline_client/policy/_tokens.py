"""Token counts without the internet: exact where the served model's vocabulary is known, else a marked estimate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from leyline_client._wire import RenderReply

BYTES_PER_TOKEN = 4
PER_MESSAGE = 4
PER_OPAQUE = 1_000


class TokenCounter:
    """Counts the tokens of a text.

    The default is an estimate: one token per four UTF-8 bytes, rounded up. ``exact`` says whether counts of
    texts are those of the served model. What a chat template puts around a message is not known offline:
    ``per_message`` tokens are assumed for it, and ``per_opaque`` for an image or another block that is not
    text. Both are estimates also where ``exact`` is True; only the server's ``render`` knows them.
    """

    def __init__(
        self,
        count: Callable[[str], int] | None = None,
        *,
        exact: bool = False,
        name: str = "estimate",
        per_message: int = PER_MESSAGE,
        per_opaque: int = PER_OPAQUE,
    ) -> None:
        self._count = count or _estimate
        self.exact = exact and count is not None
        self.name = name
        self.per_message = per_message
        self.per_opaque = per_opaque

    def count(self, text: str) -> int:
        """Tokens of ``text``; 0 for an empty one."""
        return self._count(text) if text else 0

    @classmethod
    def from_tokenizer_json(cls, path: str | Path) -> TokenCounter:
        """A counter for the vocabulary in a Hugging Face ``tokenizer.json``.

        Raises:
            ConfigurationError: tiktoken is not installed, or the file is no byte-level BPE that can be
                reproduced; the message says what stands in the way.
        """
        from ._bpe import counter_from_file

        return counter_from_file(Path(path))

    @classmethod
    def from_tiktoken(cls, encoding: Any) -> TokenCounter:
        """A counter around a ``tiktoken.Encoding`` that you made yourself. Taken to be the served model's."""
        return cls(lambda text: len(encoding.encode(text, disallowed_special=())), exact=True, name=encoding.name)

    def __repr__(self) -> str:
        return f"TokenCounter({self.name!r}, exact={self.exact})"


def _estimate(text: str) -> int:
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return -(-size // BYTES_PER_TOKEN)


ESTIMATE = TokenCounter()
"""The counter that is used where none is given."""


def counts_from_render(reply: RenderReply, messages: int) -> list[int]:
    """Tokens per message as the server rendered them: ``token_counts`` of `PolicySet.plan`. They add up to the prompt.

    What the template puts between two messages counts to the later one, what follows the last text to the last. A
    message of which no text was rendered counts 0: its tokens, if any, are its neighbour's.
    """
    ends = dict.fromkeys(range(messages), 0)
    for span in reply.spans:
        if span.message < messages:
            ends[span.message] = max(ends[span.message], span.end)
    shown = [message for message in range(messages) if ends[message]]
    counts = [0] * messages
    position = 0
    for message in shown:
        end = reply.prompt_tokens if message == shown[-1] else ends[message]
        counts[message] = end - position
        position = end
    return counts
