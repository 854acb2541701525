"""Paths of the radix tree as the graft needs them: match a source, hold it, take its tail out."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from . import compat
from .cache import Translators
from .lineage import key_elements
from .orders import Drop, Source


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a path, from a page boundary on.

    Attributes:
        nodes: ``(node, path start, path end)`` of those nobody else holds, ascending.
        kept: the same of those that must stay: locked by a request, or another history continues from them.
    """

    nodes: tuple[tuple[Any, int, int], ...] = ()
    kept: tuple[tuple[Any, int, int], ...] = ()


class Paths:
    """Access to one scheduler's radix cache."""

    def __init__(self, cache: Any, translators: Translators) -> None:
        self._cache, self._translators = cache, translators

    def key(self, source: Source, like: Any) -> Any:
        """The tree key of ``source``, in the namespace of ``like`` (the key of the request that names it)."""
        elements = key_elements(source.ids, source.lineage)
        _, rest = self._translators.lineage(like.extra_key, like.cache_salt)
        return compat.tree().RadixKey(array("q", elements.tobytes()), rest, cache_salt=like.cache_salt)

    def match(self, key: Any) -> tuple[int, Any]:
        """``(cached tokens, node)`` of a tree key. Splits a node that reaches past the end of the match."""
        return compat.match_of(self._cache.leyline_match(compat.tree().MatchPrefixParams(key=key)))

    def slots(self, node: Any) -> torch.Tensor:
        """Slots of the path to ``node``, ``(tokens,)`` int64."""
        slots: torch.Tensor = self._cache.path_device_indices(node)
        return slots

    @contextmanager
    def held(self, nodes: Sequence[Any]) -> Iterator[None]:
        """Keep the paths to ``nodes`` from being evicted."""
        locks = [self._cache.lock(node) for node in nodes]
        try:
            yield
        finally:
            for lock in locks:
                self._cache.unlock(lock)

    def tail(self, key: Any, position: int) -> Tail:
        """The tail of ``key``'s path from the page that holds ``position`` on. **Splits** a node that crosses it."""
        floor = position // self._cache.page_size * self._cache.page_size
        length, node = self.match(key)
        if length <= floor:
            return Tail()
        if floor:
            self.match(key[:floor])
        nodes: list[tuple[Any, int, int]] = []
        kept: list[tuple[Any, int, int]] = []
        for node_id, start, end, children in reversed(compat.path_nodes(self._cache, node)):
            if start < floor:
                break
            # Below the first node that has to stay nothing can go either.
            if kept or children > bool(nodes) or compat.is_locked(self._cache, node_id):
                kept.append((node_id, start, end))
            else:
                nodes.append((node_id, start, end))
        return Tail(tuple(reversed(nodes)), tuple(reversed(kept)))

    def take(self, tail: Tail) -> torch.Tensor:
        """Take ``tail``'s nodes out of the tree; the caller owns the slots returned, in path order, **unfreed**."""
        slots = [torch.cat(compat.take_leaf(self._cache, node)) for node, _, _ in reversed(tail.nodes)]
        return torch.cat(slots[::-1]) if slots else torch.empty(0, dtype=torch.int64)

    def drop(self, sources: Sequence[Source], drops: Sequence[Drop], like: Any) -> tuple[int, int]:
        """Take the tails that ``drops`` name out of the tree and free their slots.

        Returns:
            Tokens dropped, and tokens that had to stay.
        """
        keys = [(self.key(sources[drop.source], like), drop.position) for drop in drops]
        dropped, again = 0, True
        tails: list[Tail] = []
        while again:
            # What holds one path's tail may be another one that is to go as well: until nothing more goes.
            tails, before = [], dropped
            for key, position in keys:
                tail = self.tail(key, position)
                tails.append(tail)
                dropped += sum(end - start for _, start, end in tail.nodes)
                self.free(self.take(tail))
            again = len(keys) > 1 and dropped > before
        kept = {node: end - start for tail in tails for node, start, end in tail.kept}
        return dropped, sum(kept.values())

    def free(self, slots: torch.Tensor) -> None:
        """Give whole pages back to the pool."""
        if len(slots):
            self._cache.token_to_kv_pool_allocator.free_segment(slots, start_pos=0)

    def allocate(self, count: int) -> torch.Tensor | None:
        """``count`` slots (whole pages), evicting what nobody holds; None where the pool cannot give them."""
        compat.tree().evict_until_free(self._cache, count)
        slots = self._cache.token_to_kv_pool_allocator.alloc(count)
        return None if slots is None else slots.to(torch.int64)

    def room(self) -> int:
        """Slots that `allocate` can give at most."""
        _, free, evictable = compat.pool_counts(self._cache)
        return free + evictable

    def insert(self, key: Any, slots: torch.Tensor, matched: int, node: Any) -> None:
        """Give ``slots`` to the tree as positions from ``matched`` on; ``node`` is where ``key`` matches so far."""
        end = matched + len(slots)
        value = torch.cat([self.slots(node)[:matched], slots])
        params = compat.tree().InsertParams(key=key[:end], value=value, prev_prefix_len=matched)
        # Not the translating `insert`: the key is the tree's already.
        self._cache.insert(params)
