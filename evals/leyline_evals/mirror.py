"""A second opinion on a session's KV: the oracle, doing to its own cache what the receipts say happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from leyline_evals.oracle import Oracle, State


class Mirror:
    """Follows one session at a time.

    Args:
        folder: the model's checkpoint.
        page: tokens per page of the server's KV pool.
    """

    def __init__(self, folder: Path, page: int = 1) -> None:
        self.oracle, self.page = Oracle(folder), page
        self.state: State | None = None
        """The KV the session must have, of all prompt tokens of its last turn."""
        self._lost = False

    def reset(self) -> None:
        """A new session."""
        self.state, self._lost = None, False

    def follow(self, source: list[int], target: list[int], answer: dict[str, Any]) -> float | None:
        """Do what ``answer``'s receipt says and compare the answer.

        Returns:
            The largest difference of the answer's log-probabilities, or None where the receipt does not say enough (a
            replacement was prefilled but its splice failed): the session is then not followed any further.
        """
        receipt = answer["receipt"]
        if self._lost or (receipt["replacement_tokens"] and receipt["reason"]):
            self._lost = True
            return None
        wanted = self._rebuild(source, target, receipt).log_softmax(-1)
        top = answer["meta"]["output_top_logprobs"][0]
        return max(abs(float(wanted[token]) - logprob) for logprob, token, *_ in top)

    def _rebuild(self, source: list[int], target: list[int], receipt: dict[str, Any]) -> torch.Tensor:
        old, segments = self.state, receipt["segments"]
        if old is not None and old.length < len(source) - 1:
            # What the model generated was fed back, but for the last token.
            old, _ = self.oracle.extend(old, source[old.length : -1])
        first = receipt["directives"][0]["start"] if receipt["directives"] else len(source)
        prefix = min(first, len(target) - 1, 0 if old is None else old.length)
        if not segments:
            # Nothing was moved: what the receipt calls cached is a prefix, all else was computed.
            prefix = min(prefix, receipt["cached_tokens"])
        new = old.part(0, prefix) if old is not None and prefix else None
        position = prefix
        for segment in segments:
            assert old is not None
            start, end, delta = segment["start"], segment["end"], segment["delta"]
            if start > position:
                new = self._replaced(new, target[:start])
            moved = self.oracle.rotate(old.part(start - delta, end - delta), delta)
            new = moved if new is None else new.plus(moved)
            position = end
        self.state, logits = self.oracle.extend(new, target[position:])
        return logits

    def _replaced(self, new: State | None, target: list[int]) -> State:
        """``new`` with a replacement after it, up to the end of ``target``.

        The engine prefills from whole pages: what the replacement's first page holds before it is computed again for
        the replacement to attend to. In the edited view those tokens keep the KV they have.
        """
        position = 0 if new is None else new.length
        head = position // self.page * self.page
        made, _ = self.oracle.extend(new.part(0, head) if new is not None and head else None, target[head:])
        made = made.part(position, made.length)
        return made if new is None else new.plus(made)
