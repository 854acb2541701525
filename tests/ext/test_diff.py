from __future__ import annotations

import difflib
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_server_ext.diff import MIN_RUN, common_prefix, common_suffix, diff


def ids(tokens: list[int] | np.ndarray) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int64)


def kept_tokens(source: np.ndarray, target: np.ndarray) -> int:
    """Apply the hunks, check that they reproduce the target, and count what they keep."""
    hunks, kept = diff(source, target)
    out: list[int] = []
    position = total = 0
    for hunk in hunks:
        out += source[position : hunk.source_start].tolist()
        total += hunk.source_start - position
        assert len(out) == hunk.target_start
        out += target[hunk.target_start : hunk.target_end].tolist()
        assert len(out) == hunk.target_end
        assert (hunk.source_end, hunk.target_end) != (hunk.source_start, hunk.target_start), "an empty hunk"
        position = hunk.source_end
    out += source[position:kept].tolist()
    total += kept - position
    assert position <= kept <= len(source)
    assert out == target[: len(out)].tolist()
    # Nothing is kept in runs not worth a segment, and every run ends where the sides differ.
    ends = [*(hunk.source_start for hunk in hunks), kept]
    starts = [hunk.source_end for hunk in hunks]
    assert all(end - start >= MIN_RUN for start, end in zip(starts, ends[1:], strict=True))
    return total


small = st.lists(st.integers(0, 3), max_size=120)
pieces = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(1, 60)), max_size=6)


@given(small, small)
def test_hunks_reproduce_the_target(a: list[int], b: list[int]):
    kept_tokens(ids(a), ids(b))


@given(pieces, pieces)
def test_hunks_reproduce_a_target_of_common_pieces(a, b):
    """Sequences cut from the same few texts: long common runs in any order, repeated, truncated."""
    texts = np.random.default_rng(3).integers(0, 1000, (6, 100))
    source = ids([t for n, start, length in a for t in texts[n][start : start + length]])
    target = ids([t for n, start, length in b for t in texts[n][start : start + length]])
    kept = kept_tokens(source, target)
    longest = max(
        difflib.SequenceMatcher(None, source.tolist(), target.tolist(), autojunk=False).get_matching_blocks(),
        key=lambda block: block.size,
    )
    # No worse than half of the longest common run: it may be given up for several that weigh more together.
    assert kept >= longest.size // 2 - MIN_RUN


@given(st.integers(0, 600), st.integers(0, 100), st.integers(0, 30), st.integers(0, 30))
def test_one_edit_of_text_without_repeats_is_found(start: int, size: int, instead: int, new: int):
    source = ids(np.random.default_rng(1).permutation(800))
    end = min(start + size, 800)
    target = np.r_[source[:start], 1000 + np.arange(instead), source[end:], 2000 + np.arange(new)]
    hunks, kept = diff(source, target)
    if (end > start or instead) and 800 - end >= MIN_RUN:
        assert [(h.source_start, h.source_end, h.target_start, h.target_end) for h in hunks] == [
            (start, end, start, start + instead)
        ]
        assert kept == 800
    assert kept_tokens(source, target) >= 800 - size - MIN_RUN


def test_a_stub_that_occurs_again_later_does_not_lose_what_lies_between():
    """Clearing the third tool result after the fifth: the stub's words are there already, further on."""
    rng = np.random.default_rng(0)
    stub, results = rng.integers(0, 50, 20), [rng.integers(100, 9000, 500) for _ in range(6)]
    turn = [rng.integers(100, 9000, 50) for _ in range(6)]

    def history(cleared: tuple[int, ...]) -> np.ndarray:
        return np.concatenate([np.r_[turn[n], stub if n in cleared else results[n]] for n in range(6)])

    source, target = history((4,)), history((2, 4))
    hunks, kept = diff(source, target)
    assert [(h.source_end - h.source_start, h.target_end - h.target_start) for h in hunks] == [(500, 20)]
    assert kept == len(source)


SIZE = 65_536


def _same() -> tuple[np.ndarray, np.ndarray]:
    return np.full(SIZE, 5), np.r_[np.full(1000, 5), 7, np.full(SIZE - 1100, 5)]


def _alternating() -> tuple[np.ndarray, np.ndarray]:
    return np.tile([5, 6], SIZE // 2), np.r_[np.tile([5, 6], 500), 7, 7, 7, np.tile([6, 5], SIZE // 2 - 600)]


def _all_changed_a_little() -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(0).integers(0, 50_000, SIZE)
    target = source.copy()
    target[:: MIN_RUN + 1] = 77_777
    return source, target


def _one_header_everywhere() -> tuple[np.ndarray, np.ndarray]:
    header = np.arange(MIN_RUN + 1)
    turns = SIZE // (MIN_RUN + 2)
    source = np.concatenate([np.r_[header, 1000 + n] for n in range(turns)])
    return source, np.concatenate([np.r_[header, 90_000 + n] for n in range(turns)])


def _passed_by() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    text, rest = rng.integers(0, 9000, 1000), rng.integers(0, 9000, 1000)
    return np.r_[text, rest, 1, 2, 3], np.r_[rest, np.tile(text, SIZE // 1000)]


def _two_letters() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 2, SIZE), rng.integers(0, 2, SIZE)


@pytest.mark.parametrize(
    "make", [_same, _alternating, _all_changed_a_little, _one_header_everywhere, _passed_by, _two_letters]
)
def test_time_stays_near_linear(make: Callable[[], tuple[np.ndarray, np.ndarray]]):
    source, target = (ids(side) for side in make())
    spent = []
    for part in (4, 1):
        started = time.process_time()
        kept_tokens(source[: len(source) // part], target[: len(target) // part])
        spent.append(time.process_time() - started)
    # Four times the tokens: quadratic work would take sixteen times as long.
    assert spent[1] < 9 * spent[0] + 0.2
    assert spent[1] < 10


def test_repetitive_text_is_kept():
    for make in (_same, _alternating):
        source, target = (ids(side) for side in make())
        assert kept_tokens(source, target) > SIZE - 1500


@given(small, small)
def test_common_prefix_and_suffix(a: list[int], b: list[int]):
    n = common_prefix(ids(a), ids(b))
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]
    n = common_suffix(ids(a), ids(b))
    assert a[len(a) - n :] == b[len(b) - n :]
    assert n == min(len(a), len(b)) or a[-n - 1] != b[-n - 1]
