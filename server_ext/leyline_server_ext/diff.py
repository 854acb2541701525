"""What changed between the tokens a session holds and the tokens of its next prompt.

Not a minimal edit script: what matters is that long runs of kept tokens are found, in order, in time near linear in the
prompt, whatever the prompt. Runs shorter than `MIN_RUN` are not worth a segment of their own and count as replaced.

First the windows that occur once on either side are chained (the heaviest chain that ascends on both sides): they
cannot be mistaken for another place. Between them, repeated text (stubs, turn headers) is matched from left to right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int64]

MIN_RUN = 12
"""Shortest kept run between two changes. Chat templates repeat shorter runs (turn headers) everywhere."""
_CANDIDATES = 32
"""Places of the source looked at for one anchor: repeated tool output has many, the longest match wins."""
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Hunk:
    """Source tokens ``[source_start, source_end)`` became target tokens ``[target_start, target_end)``."""

    source_start: int
    source_end: int
    target_start: int
    target_end: int


@dataclass(slots=True)
class _Run:
    """``length`` equal tokens at source ``s`` and target ``t``."""

    s: int
    t: int
    length: int


def common_prefix(a: Ids, b: Ids) -> int:
    """Length of the common prefix; looks no further than twice as far as it reaches."""
    n, low, step = min(len(a), len(b)), 0, 64
    while low < n:
        high = min(low + step, n)
        different = a[low:high] != b[low:high]
        where = int(different.argmax())
        if different[where]:
            return low + where
        low, step = high, 2 * step
    return n


def common_suffix(a: Ids, b: Ids) -> int:
    """Length of the common suffix."""
    return common_prefix(a[::-1], b[::-1])


def diff(source: Ids, target: Ids) -> tuple[list[Hunk], int]:
    """Hunks that turn ``source`` into ``target``, and how much of the source they account for.

    Returns:
        The hunks before the last kept token, ascending and disjoint, and ``kept``: the source position after which
        nothing is kept. Source tokens from ``kept`` on are gone, target tokens after the last kept run are new.
    """
    s = t = common_prefix(source, target)
    if s == len(source) or t == len(target):
        return [], s
    hunks: list[Hunk] = []
    for run in _kept_runs(source, target, s):
        if run.s == s and run.t == t:
            s, t = s + run.length, t + run.length
            continue
        hunks.append(Hunk(s, run.s, t, run.t))
        s, t = run.s + run.length, run.t + run.length
    return hunks, s


def _kept_runs(source: Ids, target: Ids, start: int) -> list[_Run]:
    """Kept runs after the common prefix of ``start`` tokens: ascending and disjoint on both sides."""
    places = _Places(source, target, start)
    runs: list[_Run] = []
    s = t = start
    for anchor in [*_heaviest_chain(places.unique_runs()), None]:
        s_end, t_end = (len(source), len(target)) if anchor is None else (anchor.s, anchor.t)
        if s_end < s or t_end < t:
            # The chain ascends by starts; what an earlier run grew over is cut off.
            overlap = max(s - s_end, t - t_end)
            assert anchor is not None
            anchor = _Run(anchor.s + overlap, anchor.t + overlap, anchor.length - overlap)
            s_end, t_end = anchor.s, anchor.t
        while (found := places.next_run(s, t, s_end, t_end)) is not None:
            runs.append(found)
            s, t = found.s + found.length, found.t + found.length
        if anchor is not None and anchor.length >= MIN_RUN:
            back = common_suffix(source[s : anchor.s], target[t : anchor.t])
            ahead = common_prefix(source[anchor.s + anchor.length :], target[anchor.t + anchor.length :])
            runs.append(_Run(anchor.s - back, anchor.t - back, back + anchor.length + ahead))
            s, t = anchor.s + anchor.length + ahead, anchor.t + anchor.length + ahead
    return runs


class _Places:
    """Where the windows of `MIN_RUN` target tokens occur in the source, by hash. Positions are absolute."""

    def __init__(self, source: Ids, target: Ids, start: int) -> None:
        self.source, self.target, self.start = source, target, start
        hashes, wanted = _window_hashes(source[start:]), _window_hashes(target[start:])
        self._order = np.argsort(hashes, kind="stable")
        ascending = hashes[self._order]
        firsts = np.flatnonzero(np.r_[True, ascending[1:] != ascending[:-1]]) if len(hashes) else self._order
        values = ascending[firsts]
        group = np.minimum(np.searchsorted(values, wanted), max(len(values) - 1, 0))
        self._known = np.flatnonzero(values[group] == wanted) if len(values) else np.empty(0, np.int64)
        self._group = group[self._known]
        self._bounds = np.r_[firsts, len(hashes)]
        # The order is stable, so equal windows ascend: the last one tells whether any is left after a position.
        self._last = self._order[self._bounds[self._group + 1] - 1]

    def unique_runs(self) -> list[_Run]:
        """Diagonal runs of windows that occur once on either side, by target position."""
        if not len(self._known):
            return []
        once = np.bincount(self._group)[self._group] == 1
        once &= np.diff(self._bounds)[self._group] == 1
        t, s = self._known[once], self._last[once]
        if not len(t):
            return []
        breaks = np.flatnonzero((np.diff(t) != 1) | (np.diff(s) != 1)) + 1
        firsts, ends = np.r_[0, breaks], np.r_[breaks, len(t)]
        return [
            _Run(int(s[a]) + self.start, int(t[a]) + self.start, int(b - a) + MIN_RUN - 1)
            for a, b in zip(firsts.tolist(), ends.tolist(), strict=True)
        ]

    def next_run(self, s: int, t: int, s_end: int, t_end: int) -> _Run | None:
        """First run inside source ``[s, s_end)`` and target ``[t, t_end)``."""
        low = int(np.searchsorted(self._known, t - self.start))
        high = int(np.searchsorted(self._known, t_end - MIN_RUN - self.start, "right"))
        if s_end - s < MIN_RUN:
            return None
        for block in range(low, high, _BLOCK):
            left = np.flatnonzero(self._last[block : min(block + _BLOCK, high)] >= s - self.start)
            for offset in left:
                best = self._longest(block + int(offset), s, s_end, t_end)
                if best is not None:
                    return best
        return None

    def _longest(self, known: int, s: int, s_end: int, t_end: int) -> _Run | None:
        t, group = int(self._known[known]) + self.start, self._group[known]
        places = self._order[self._bounds[group] : self._bounds[group + 1]]
        # Among equally long matches the earliest deletes least.
        first = int(np.searchsorted(places, s - self.start))
        best: _Run | None = None
        for place in places[first : first + _CANDIDATES].tolist():
            at = place + self.start
            length = common_prefix(self.source[at:s_end], self.target[t:t_end])
            if length >= MIN_RUN and (best is None or length > best.length):
                best = _Run(at, t, length)
        return best


def _heaviest_chain(runs: list[_Run]) -> list[_Run]:
    """The heaviest subsequence of ``runs`` (ascending in the target) that ascends in the source too."""
    if len(runs) < 2:
        return runs
    ranks = {s: rank + 1 for rank, s in enumerate(sorted(run.s for run in runs))}
    best: list[tuple[int, int]] = [(0, -1)] * (len(runs) + 1)  # Fenwick tree of (weight, run) over source ranks
    before = [-1] * len(runs)
    heaviest = (0, -1)
    for index, run in enumerate(runs):
        rank, top = ranks[run.s] - 1, (0, -1)
        while rank > 0:
            top, rank = max(top, best[rank]), rank - (rank & -rank)
        before[index] = top[1]
        mine = (top[0] + run.length, index)
        heaviest, rank = max(heaviest, mine), ranks[run.s]
        while rank < len(best):
            best[rank], rank = max(best[rank], mine), rank + (rank & -rank)
    chain, index = [], heaviest[1]
    while index >= 0:
        chain.append(runs[index])
        index = before[index]
    return chain[::-1]


def _window_hashes(ids: Ids) -> npt.NDArray[np.uint64]:
    """Polynomial hashes (mod 2**64) of all windows of `MIN_RUN` tokens."""
    count = len(ids) - MIN_RUN + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    hashes = np.zeros(count, np.uint64)
    mixed = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    for offset in range(MIN_RUN):
        hashes = hashes * np.uint64(0x100000001B3) + mixed[offset : offset + count]
    return hashes
