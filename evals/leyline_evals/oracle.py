"""The independent oracle: transformers alone, fp32, cache surgery with a rotation written from the formula.

It shares no code with Leyline or SGLang. A state is the list of per-layer rows a server would hold: for GQA K
``(tokens, heads, dim)`` and V, for MLA one row ``(tokens, 1, latent + rotary)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

Edit = tuple[int, int, list[int]]


@dataclass
class State:
    """KV of one sequence: ``first``, ``second`` per layer as transformers caches them, ``(1, heads, tokens, dim)``."""

    first: list[torch.Tensor]
    second: list[torch.Tensor]

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.first[0].shape[2]

    def part(self, start: int, end: int) -> State:
        """Tokens ``[start, end)``."""
        return State([t[:, :, start:end] for t in self.first], [t[:, :, start:end] for t in self.second])

    def plus(self, other: State) -> State:
        """``other`` after this."""
        return State(
            [torch.cat(pair, 2) for pair in zip(self.first, other.first, strict=True)],
            [torch.cat(pair, 2) for pair in zip(self.second, other.second, strict=True)],
        )


class Oracle:
    """Full prefill, re-prefill and splice of token sequences on one model."""

    def __init__(self, folder: Path) -> None:
        config = AutoConfig.from_pretrained(folder)
        self.mla = config.model_type == "deepseek_v2"
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.eval()
        self.inv_freq = self.model.model.rotary_emb.inv_freq.double()

    @torch.no_grad()
    def extend(self, state: State | None, ids: list[int]) -> tuple[State, torch.Tensor]:
        """Prefill ``ids`` on top of ``state``; the new state and the logits of the last token."""
        cache = DynamicCache()
        past = 0 if state is None else state.length
        if state is not None:
            for layer, (a, b) in enumerate(zip(state.first, state.second, strict=True)):
                cache.update(a.clone(), b.clone(), layer)
        positions = torch.arange(past, past + len(ids))
        out = self.model(torch.tensor([ids]), past_key_values=cache, position_ids=positions[None], use_cache=True)
        layers = out.past_key_values.layers
        return State([x.keys for x in layers], [x.values for x in layers]), out.logits[0, -1].double()

    def turn(self, x: torch.Tensor, delta: int) -> torch.Tensor:
        """Rotary dimensions moved by ``delta``: pair ``(x, y)`` to ``(x cos - y sin, y cos + x sin)``."""
        angle = self.inv_freq * delta
        cos, sin, x = angle.cos(), angle.sin(), x.double()
        if self.mla:  # interleaved pairs
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).float()
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).float()

    def rotate(self, state: State, delta: int) -> State:
        """Move a run of KV by ``delta`` positions."""
        if self.mla:
            return State(state.first, [self.turn(t, delta) for t in state.second])
        return State([self.turn(t, delta) for t in state.first], state.second)

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K rows of the server's pool as ``(dimensions without position, rotary dimensions)``."""
        bare = rows.shape[-1] - 2 * len(self.inv_freq)
        return rows[..., :bare], rows[..., bare:]

    def splice(self, source: list[int], cached: int, edits: list[Edit], tail: list[int]) -> tuple[State, torch.Tensor]:
        """Amortize: keep, rotate, prefill replacements on top of the edited prefix, then the tail.

        ``cached`` tokens of the source have KV; what lies beyond is prefilled with the tail.
        """
        full, _ = self.extend(None, source[:cached])
        state: State | None = None
        position, logits = 0, torch.empty(0)
        pending: list[int] = []

        def keep(start: int, end: int) -> None:
            nonlocal state
            if end <= start:
                return
            moved = self.rotate(full.part(start, end), (0 if state is None else state.length) - start)
            state = moved if state is None else state.plus(moved)

        for start, end, replacement in edits:
            keep(position, min(start, cached))
            if replacement and end < cached:
                state, logits = self.extend(state, replacement)
            elif replacement:
                pending = replacement
            position = end
        keep(position, cached)
        rest = pending + source[max(position, cached) :] + tail
        assert rest, "the engine always computes the last token"
        state, logits = self.extend(state, rest)
        return state, logits

    def rows(self, state: State) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``(layers, tokens, heads, dim)`` K rows and V rows as the server's pool holds them (MLA: one row, no V)."""
        first = torch.stack([t[0].transpose(0, 1) for t in state.first])
        second = torch.stack([t[0].transpose(0, 1) for t in state.second])
        return (torch.cat([first, second], -1), None) if self.mla else (first, second)


def relative_l2(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """``|found - wanted| / |wanted|`` over everything, in double."""
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm())
