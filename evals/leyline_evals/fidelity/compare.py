"""Two next-token distributions, each known by its top log probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyline_evals.common import EvalError

_TINY = 1e-12
"""Least mass of a class, so that a class one side rounds to nothing stays comparable."""


@dataclass(frozen=True)
class Distribution:
    """The ``k`` most probable next tokens. ``logprobs``: token id -> natural log of its probability."""

    logprobs: Mapping[int, float]

    @property
    def first(self) -> int:
        """The most probable token; of several equally probable ones the least id, so that ties compare equal."""
        return min(self.logprobs, key=lambda token: (-self.logprobs[token], token))

    def top(self, k: int) -> set[int]:
        """The ``k`` most probable tokens."""
        return set(sorted(self.logprobs, key=lambda token: (-self.logprobs[token], token))[:k])


def from_meta(meta: Mapping[str, Any]) -> Distribution:
    """The distribution of the first generated token, from SGLang's ``output_top_logprobs``.

    Raises:
        EvalError: the reply carries none.
    """
    try:
        rows: Sequence[Sequence[Any]] = meta["output_top_logprobs"][0]
        found = {int(row[1]): float(row[0]) for row in rows}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EvalError("the reply carries no log probabilities of its first token") from error
    if not found:
        raise EvalError("the reply carries no log probabilities of its first token")
    return Distribution(found)


def overlap(first: Distribution, second: Distribution, k: int) -> float:
    """Share of the ``k`` most probable tokens that both have in common, in [0, 1]."""
    one, other = first.top(k), second.top(k)
    return len(one & other) / max(len(one), len(other))


def kl(reference: Distribution, other: Distribution) -> float:
    """A lower bound of KL(reference || other), in nats.

    Only the listed tokens are known, so the vocabulary is divided into classes: every token that *both* list, and one
    class of all others, which has the remaining mass. KL between distributions over classes is never more than between
    the full ones (data processing inequality), and close to it where the top tokens hold most of the mass.
    """
    shared = reference.logprobs.keys() & other.logprobs.keys()
    p = {token: math.exp(reference.logprobs[token]) for token in shared}
    q = {token: math.exp(other.logprobs[token]) for token in shared}
    pairs = [(p[token], q[token]) for token in shared]
    pairs.append((max(0.0, 1.0 - sum(p.values())), max(0.0, 1.0 - sum(q.values()))))
    # Log probabilities come rounded; a total a hair off one must not give a negative divergence.
    return max(0.0, sum(a * math.log(max(a, _TINY) / max(b, _TINY)) for a, b in pairs if a > 0))
