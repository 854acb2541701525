from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the graft needs torch")
import torch

from leyline_client._models import Reason
from leyline_server_ext.lineage import Lineage
from leyline_server_ext.orders import Candidate, Piece
from leyline_server_ext.rows import Spliced, Stay, collect, gaps, picked


def cached(**counts: int) -> dict[int, tuple[int, torch.Tensor]]:
    """Sources by number; slot = 1000 * source + position."""
    return {int(n[1:]): (count, 1000 * int(n[1:]) + torch.arange(count)) for n, count in counts.items()}


PIECE = Piece(20, 50, (Candidate(1, 30, 0), Candidate(0, 25, 2)))


def test_the_oldest_cached_candidate_supplies_every_position():
    rows = collect([PIECE], cached(s0=100, s1=40), 20, 60, 1)
    assert rows.segments == [(20, 30, -10, 1), (30, 50, -5, 3)]
    assert torch.cat(rows.slots).tolist() == [*range(1030, 1040), *range(35, 55)]
    assert rows.delta().tolist() == [-10] * 10 + [-5] * 20
    assert rows.reason is None


def test_one_shift_is_one_number():
    rows = collect([PIECE], cached(s0=100, s1=0), 20, 60, 1)
    assert rows.delta() == -5
    assert rows.segments == [(20, 50, -5, 3)]


def test_a_match_inside_a_piece_is_continued():
    rows = collect([PIECE], cached(s0=100, s1=0), 33, 60, 1)
    assert torch.cat(rows.slots).tolist() == list(range(38, 55))
    assert rows.segments == [(33, 50, -5, 3)]


@pytest.mark.parametrize(
    ("pieces", "found", "matched", "count", "reason"),
    [
        ([PIECE], {"s0": 25, "s1": 0}, 20, 0, Reason.SOURCE_NOT_CACHED),
        ([PIECE], {"s0": 30, "s1": 0}, 20, 5, Reason.SOURCE_PARTIALLY_CACHED),
        ([PIECE], {"s0": 100, "s1": 0}, 19, 0, Reason.SOURCE_NOT_CACHED),
        ([PIECE, Piece(60, 70, (Candidate(0, 60, 0),))], {"s0": 99, "s1": 0}, 20, 30, Reason.REPLACEMENT_NOT_CACHED),
        (
            [PIECE, Piece(50, 60, (Candidate(2, 50, 0),), prefilled=True)],
            {"s0": 99, "s1": 0, "s2": 50},
            20,
            30,
            Reason.REPLACEMENT_NOT_CACHED,
        ),
    ],
)
def test_what_is_missing_is_named(pieces, found, matched, count, reason):
    rows = collect(pieces, cached(**found), matched, 100, 1)
    assert (rows.count, rows.reason) == (count, reason)


def test_only_whole_pages_are_taken():
    rows = collect([Piece(16, 50, (Candidate(0, 20, 0),))], cached(s0=100), 16, 100, 16)
    assert (rows.start, rows.end) == (16, 48)
    assert rows.segments == [(16, 48, -4, 1)]
    assert torch.cat(rows.slots).tolist() == list(range(20, 52))


@pytest.mark.parametrize(
    ("pieces", "first", "stays"),
    [
        # A page that starts with tokens of the prefix, and the whole pages after it.
        ([(16, 19, 16), (19, 70, 35)], 16, [Stay(16, 48, 48)]),
        # Not by whole pages.
        ([(16, 70, 20)], 16, []),
        # Two runs; between them a page that holds some of both.
        ([(16, 40, 32), (40, 100, 72)], 16, [Stay(0, 16, 32), Stay(32, 80, 80)]),
        # What lies before the source's tail belongs to the prefix.
        ([(16, 70, 16)], 32, [Stay(16, 48, 32)]),
        # Less than a page.
        ([(16, 30, 32)], 16, []),
    ],
)
def test_what_can_stay_are_whole_pages_moved_by_whole_pages(pieces, first, stays):
    rows = collect([Piece(a, b, (Candidate(0, start, 0),)) for a, b, start in pieces], cached(s0=200), 16, 200, 16)
    assert rows.staying(0, first, 16) == stays
    assert rows.staying(1, first, 16) == []


def test_on_pages_of_one_token_everything_of_the_source_can_stay():
    rows = collect([PIECE], cached(s0=100, s1=40), 20, 60, 1)
    assert rows.staying(0, 20, 1) == [Stay(10, 30, 35)]
    assert rows.staying(1, 20, 1) == [Stay(0, 10, 30)]


def test_gaps_and_ranges_are_all_rows():
    assert gaps([(2, 4), (4, 5), (7, 10)], 10) == [(0, 2), (5, 7)]
    assert gaps([], 10) == [(0, 10)]
    assert gaps([(0, 10)], 10) == []
    assert picked(torch.arange(10), [(0, 2), (5, 7)]).tolist() == [0, 1, 5, 6]
    assert picked(torch.arange(10), []).tolist() == []


def test_nothing_beyond_what_the_engine_can_use():
    assert collect([PIECE], cached(s0=100, s1=100), 20, 41, 1).end == 41


def test_generations_are_told_to_who_finds_the_splice_cached():
    spliced, lineage = Spliced(), Lineage(((20, 7),), 50)
    spliced.note(lineage, [(20, 30, -10, 1), (30, 50, -5, 3)])
    assert spliced.report(lineage, [PIECE], 50) == [(20, 30, -10, 1), (30, 50, -5, 3)]
    assert spliced.report(lineage, [PIECE], 35) == [(20, 30, -10, 1), (30, 35, -5, 3)]
    spliced.note(lineage, [(25, 35, -10, 1)])
    assert spliced.report(lineage, [PIECE], 50) == [(20, 25, -10, 1), (25, 35, -10, 1), (35, 50, -5, 3)]


def test_an_unknown_splice_is_estimated_from_above():
    spliced = Spliced(limit=1)
    spliced.note(Lineage(((20, 7),), 50), [(20, 50, -10, 1)])
    spliced.note(Lineage(((20, 8),), 50), [(20, 30, -10, 1)])
    assert spliced.report(Lineage(((20, 7),), 50), [PIECE], 50) == [(20, 50, -5, 3)], "forgotten"
    assert spliced.report(Lineage(((20, 8),), 50), [PIECE], 50) == [(20, 30, -10, 1), (30, 50, -5, 3)]
