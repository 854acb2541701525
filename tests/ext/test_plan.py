from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_client._models import Mode
from leyline_server_ext.diff import Hunk
from leyline_server_ext.lineage import Lineage, key_elements
from leyline_server_ext.orders import Drop
from leyline_server_ext.plan import make_plan
from leyline_server_ext.views import Ancestor, Change, Plan, Run, View, as_ids, compose

TEXT = as_ids(np.random.default_rng(5).permutation(1000))


def edit(
    view: View, *spans: tuple[int, int, Sequence[int], Mode], append: Sequence[int] = (9, 9, 9)
) -> tuple[np.ndarray, list[Change]]:
    """Target and changes of ``(start, end, replacement, mode)`` spans, as the token-level route makes them."""
    target: list[int] = []
    changes, position = [], 0
    for start, end, text, mode in spans:
        target += view.ids[position:start].tolist()
        changes.append(Change(Hunk(start, end, len(target), len(target) + len(text)), mode))
        target += text
        position = end
    return as_ids([*target, *view.ids[position:].tolist(), *append]), changes


def planned(view: View, *spans: tuple[int, int, Sequence[int], Mode], **kwargs: object) -> Plan:
    target, changes = edit(view, *spans)
    return make_plan(view, kwargs.pop("ancestors", ()), target, changes, kept=len(view.ids), **kwargs)  # type: ignore[arg-type]


A, F = Mode.AMORTIZE, Mode.FORGET


def test_a_deletion_needs_no_prefill_of_its_own():
    plan = planned(View(TEXT[:100]), (20, 30, [], A))
    (piece,) = plan.order.pieces
    assert (piece.start, piece.end, piece.candidates[0].start) == (20, 89, 30)
    assert plan.warmups == ()
    assert plan.lineage.first == 20
    assert plan.lineage.spliced_until == 89, "the view's last token was never fed"
    assert plan.order.release == (Drop(0, 20),)
    assert plan.order.exclusive


def test_a_replacement_is_prefilled_first_and_stays_under_the_key_before_it():
    plan = planned(View(TEXT[:100]), (20, 30, [7, 7], A))
    assert plan.warmups == ((22, Lineage()),)
    assert plan.lineage.first == 22
    assert [(p.start, p.end) for p in plan.order.pieces] == [(22, 91)]


def test_nothing_after_the_span_is_nothing_to_splice():
    plan = planned(View(TEXT[:100]), (60, 100, [], A))
    assert not plan.rotates
    assert plan.order.release == (Drop(0, 60),)
    assert plan.lineage == Lineage()


def test_equal_edits_of_equal_text_share_and_others_do_not():
    view = View(TEXT[:100])
    other = View(as_ids([*TEXT[:20], 5, *TEXT[21:100]]))
    first = planned(view, (20, 30, [7], A))
    assert planned(view, (20, 30, [7], A)).lineage == first.lineage
    different = [
        planned(other, (20, 30, [7], A)),  # other text evicted, equal target
        planned(view, (20, 29, [7], A)),
        planned(view, (20, 30, [8], A)),
        planned(view, (20, 30, [7, 7], A)),
    ]
    assert (different[0].target == first.target).all()
    assert len({plan.lineage.entries for plan in [first, *different]}) == 5


def test_touching_changes_are_signed_as_one():
    """The first of them keeps nothing after it: what it evicted must still tell lineages apart."""
    view, other = View(TEXT[:100]), View(as_ids([*TEXT[:20], 5, *TEXT[21:100]]))
    spans = ((20, 25, [1], A), (25, 30, [2], A))
    plan = planned(view, *spans)
    assert plan.lineage.entries != planned(other, *spans).lineage.entries
    assert plan.lineage == planned(view, (20, 30, [1, 2], A)).lineage


def test_forget_drops_from_its_first_token_and_prefills_from_there():
    plan = planned(View(TEXT[:100]), (40, 50, [], F))
    assert not plan.rotates
    assert plan.order.forget == (Drop(0, 40),)
    assert plan.forget_from == 40
    assert plan.lineage == Lineage()


def test_amortize_before_a_forget_stands_and_after_it_does_not():
    plan = planned(View(TEXT[:200]), (20, 30, [], A), (80, 90, [7], F), (120, 130, [], A))
    assert [(p.start, p.end, p.candidates[0].start) for p in plan.order.pieces] == [(20, 70, 30)]
    assert plan.forget_from == 70
    assert plan.order.forget == (Drop(0, 80),)
    assert plan.lineage.spliced_until == 70
    assert [position for position, _ in plan.lineage.entries] == [20, 70]


def test_an_insertion_forgets_nothing():
    assert planned(View(TEXT[:100]), (40, 40, [1], F)).order.forget == ()


def test_forget_reaches_what_an_ancestor_shares_before_any_run():
    """An earlier view holds the forgotten text in the prefix both have: its own branch below must go too."""
    before = View(TEXT[:200])
    first = planned(before, (100, 110, [], A), release=False)
    ancestor = Ancestor(before, first.runs)
    view = View(first.target, first.lineage)
    plan = planned(view, (40, 50, [], F), ancestors=(ancestor,))
    assert set(plan.order.forget) == {Drop(0, 40), Drop(1, 40)}
    late = planned(view, (150, 160, [], F), ancestors=(ancestor,))
    assert set(late.order.forget) == {Drop(0, 150), Drop(1, 160)}
    gone = planned(View(as_ids([*TEXT[:30], 1, *view.ids[31:]])), (20, 32, [], F), ancestors=(ancestor,))
    assert Drop(1, 20) in gone.order.forget


def test_each_segment_comes_from_the_oldest_view_that_holds_it():
    before = View(TEXT[:200])
    first = planned(before, (50, 60, [], A), release=False)
    view = View(first.target, first.lineage, ((50, 189, 1),))
    plan = planned(view, (20, 25, [], A), ancestors=(Ancestor(before, first.runs),))
    found = [(p.start, p.end, [(c.source, c.start, c.generation) for c in p.candidates]) for p in plan.order.pieces]
    assert found == [(20, 45, [(0, 25, 0)]), (45, 184, [(1, 60, 0), (0, 50, 1)]), (184, 187, [(0, 189, 0)])]


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("seed", range(30))
def test_on_a_page_grid_the_order_leaves_no_gap(page: int, seed: int):
    rng = np.random.default_rng(seed)
    view = View(TEXT[: 300 + seed])
    if seed % 2:
        first = planned(view, (33, 40, [1], A), page_size=page)
        view = View(first.target, first.lineage, ((34, 200, 1),))
    edges = sorted(rng.choice(280, 2 * int(rng.integers(1, 4)), replace=False).tolist())
    spans = [(a, b, [3] * int(rng.integers(0, 20)), A) for a, b in zip(edges[0::2], edges[1::2], strict=True)]
    plan = planned(view, *spans, page_size=page)
    pieces = plan.order.pieces
    if not pieces:
        assert len(plan.target) < edges[-1] + page, "a page could be spliced"
        assert plan.warmups == ()
        return
    assert pieces[0].start % page == 0
    assert pieces[-1].end % page == 0
    assert all(a.end == b.start for a, b in pairwise(pieces))
    assert plan.lineage.spliced_until == pieces[-1].end
    assert all(length % page == 0 for length, _ in plan.warmups)
    for piece in pieces:
        for c in piece.candidates:
            source = plan.order.sources[c.source]
            taken = source.ids[c.start : c.start + piece.end - piece.start]
            assert (taken == plan.target[piece.start : piece.end]).all(), "other tokens than the target's"
            if piece.prefilled:
                assert any(lineage == source.lineage for _, lineage in plan.warmups)
    # Under its own key an internal prefill is honest from the page of its replacement on.
    for (length, lineage), piece in zip(plan.warmups, [p for p in pieces if p.prefilled], strict=True):
        assert lineage.spliced_until <= piece.start // page * page
        assert length >= piece.end


def test_a_replacement_on_top_of_recomputed_tokens_has_a_signature_of_its_own():
    """At page size 16 the prefill of the second replacement recomputes spliced tokens before it."""
    view = View(TEXT[:300])
    coarse, fine = (planned(view, (20, 30, [], A), (60, 70, [7], A), page_size=page) for page in (16, 1))
    assert dict(coarse.lineage.entries)[50] != dict(fine.lineage.entries)[50]
    assert dict(fine.warmups[-1][1].entries)[50] == dict(fine.lineage.entries)[50]
    (_, lineage) = coarse.warmups[-1]
    key, target = key_elements(coarse.target[:64], lineage), key_elements(coarse.target[:64], coarse.lineage)
    assert (key[:48] == target[:48]).all()
    assert (key[48:] != target[48:]).all()


def test_text_spliced_and_the_same_text_prefilled_on_top_have_two_keys():
    """Equal edits of a long and of a short text; the short one's conversation then says what the long one said."""
    spliced = planned(View(TEXT[:100]), (20, 30, [], A))
    short = planned(View(TEXT[:61]), (20, 30, [], A))
    said = make_plan(View(short.target[:50], short.lineage), (), spliced.target, [], kept=50)
    one, other = (key_elements(spliced.target, plan.lineage).tolist() for plan in (spliced, said))
    assert one[:50] == other[:50]
    assert not set(one[50:]) & set(other[50:])
    # The same holds for a replacement by the very text that follows in the view.
    view = View(spliced.target, spliced.lineage)
    again = planned(view, (40, 42, view.ids[40:43].tolist(), A))
    assert (key_elements(again.target[:43], again.lineage)[40:] != key_elements(view.ids[:43], view.lineage)[40:]).all()


def test_a_tail_shorter_than_a_page_is_not_spliced():
    plan = planned(View(TEXT[:64]), (50, 62, [1, 2, 3], A), page_size=64)
    assert not plan.rotates
    assert plan.warmups == ()


def test_an_append_continues_the_lineage():
    view = View(TEXT[:100], Lineage(((20, 5),), 60).ended())
    assert make_plan(view, (), as_ids([*TEXT[:100], 1]), [], kept=100).lineage == view.lineage
    assert make_plan(view, (), TEXT[:41], [], kept=40).lineage == Lineage(((20, 5),), 40).ended()
    assert make_plan(view, (), TEXT[:40], [], kept=40).lineage == Lineage(((20, 5),), 39).ended(), "computed anyway"
    assert make_plan(view, (), TEXT[:20], [], kept=20).lineage == Lineage()


@pytest.mark.parametrize("mode", [A, F])
def test_what_is_not_spliced_is_prefilled_from_its_page(mode: Mode):
    """A page that only part of is kept is computed again as a whole: its KV is not the view's any more."""
    view = View(TEXT[:100], Lineage(((20, 5),), 64).ended())
    assert make_plan(view, (), as_ids([*TEXT[:60], 1]), [], kept=60, page_size=16).lineage.spliced_until == 48
    assert planned(view, (60, 100, [], mode), page_size=16).lineage == Lineage(((20, 5),), 48).ended()
    assert planned(view, (70, 100, [], mode), page_size=16).lineage == view.lineage
    assert planned(view, (18, 100, [], mode), page_size=16).lineage == Lineage()


@given(st.lists(st.integers(0, 199), min_size=2, max_size=8, unique=True), st.data())
def test_composed_ancestors_still_hold_the_same_tokens(edges: list[int], data: st.DataObject):
    edges.sort()
    views, ancestors = [View(TEXT[:200])], ()
    for _ in range(3):
        view = views[-1]
        cuts = sorted(data.draw(st.lists(st.integers(0, len(view.ids) - 1), min_size=2, max_size=6, unique=True)))
        spans = [(a, b, [1001], A) for a, b in zip(cuts[0::2], cuts[1::2], strict=False)]
        target, changes = edit(view, *spans)
        plan = make_plan(view, ancestors, target, changes, kept=len(view.ids), release=False)
        ancestors = compose(ancestors, changes, plan.runs)
        if plan.runs:
            ancestors = (*ancestors, Ancestor(view, plan.runs))
        for ancestor in ancestors:
            for run in ancestor.runs:
                moved = ancestor.view.ids[run.origin : run.origin + run.end - run.start]
                assert (moved == target[run.start : run.end]).all()
        views.append(View(target, plan.lineage))


def test_compose_keeps_everything_where_nothing_changed():
    ancestor = Ancestor(View(TEXT[:10]), (Run(0, 5, 5),))
    assert compose((ancestor,), [], ()) == (ancestor,)
