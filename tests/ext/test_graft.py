"""Directed tests of the graft: what must be so when nothing gets in its way, and what may not happen when it does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from leyline_client._models import Directive, Executed, Reason

pytestmark = pytest.mark.usefixtures("engine")

KINDS = [("rust", "mla"), ("python", "mha")]
TEXT = [1 + (i * i * 7 + i // 3) % 5 for i in range(600)]


def office(page: int = 1, core: str = "rust", kind: str = "mla", tokens: int = 1920, **kwargs: Any) -> Any:
    from conversations import Office
    from kv_world import World

    return Office(World(page=page, kind=kind, core=core, tokens=tokens, **kwargs))


@st.composite
def directives_in(draw: st.DrawFn, length: int, token: int) -> list[Directive]:
    edges = sorted(draw(st.lists(st.integers(0, length - 1), min_size=2, max_size=8, unique=True)))
    sizes = draw(st.lists(st.integers(0, 20), min_size=4, max_size=4))
    return [
        Directive(start=a, end=b, replacement=(token,) * size)
        for a, b, size in zip(edges[0::2], edges[1::2], sizes, strict=False)
    ]


def figures(receipt: Any) -> dict[str, Any]:
    """What a dry run foretells."""
    names = ("executed", "cached_tokens", "prefilled_tokens", "replacement_tokens", "rotated_tokens")
    return {name: getattr(receipt, name) for name in names}


def foreseen(here: Any, talk: Any, directives: list[Directive], append: list[int]) -> dict[str, Any]:
    from leyline_server_ext.rates import Rates
    from leyline_server_ext.turns import Turn

    turn = Turn(talk.session, here.facts)
    turn.plan_directives(directives, append)
    return figures(Rates().predict(turn).receipt)


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize(("core", "kind"), KINDS)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(data=st.data())
def test_with_room_and_peace_every_ordered_piece_is_spliced(data: st.DataObject, page: int, core: str, kind: str):
    """Several edits on end, any page size: no reason, what was foretold, and the source is gone from the pool."""
    here = office(page, core, kind)
    talk = here.open(data.draw(st.sampled_from([None, "a"])))
    here.edit(talk, [], TEXT[: data.draw(st.integers(150, 300))])
    for turn in range(data.draw(st.integers(1, 3))):
        directives = data.draw(directives_in(len(talk.ids), 9 + turn))
        assume(len(talk.ids) + sum(d.delta for d in directives) > 1)
        predicted = foreseen(here, talk, directives, [3, 3, 3])
        info = here.edit(talk, directives, [3, 3, 3])
        assert predicted == figures(info.receipt)
        assert info.receipt.reason in (None, Reason.TAIL_TOO_SHORT)
        assert info.receipt.reason is not None or info.receipt.executed is Executed.AMORTIZE
        whole = here.world.cache.evictable_size()
        fed = len(talk.ids) - 1
        assert whole == fed // page * page, "something is cached that no conversation holds"
        here.world.check()


@pytest.mark.parametrize("page", [1, 16])
def test_a_kept_source_can_be_gone_back_to_without_prefill(page: int):
    here = office(page)
    talk = here.open(None)
    here.edit(talk, [], TEXT[:200])
    here.edit(talk, [Directive(start=20, end=40)], [1], keep=True)
    here.undo(talk)
    info = here.edit(talk, [], [2, 2])
    assert info.receipt.prefilled_tokens <= 4 + page


@pytest.mark.parametrize("page", [1, 16, 64])
def test_an_earlier_view_supplies_nothing_that_was_computed_again_since(page: int):
    """The end is taken back in the middle of a spliced page, which is prefilled then; a third edit moves that page."""
    here = office(page)
    talk = here.open(None)
    here.edit(talk, [], TEXT[:300])
    here.edit(talk, [Directive(start=20, end=30)], [1], keep=True)
    whole = 200 // page * page
    here.edit(talk, [Directive(start=200, end=len(talk.ids))], [2] * 100, keep=True)
    assert talk.session.memory.view.lineage.spliced_until == whole
    (ancestor,) = talk.session.memory.ancestors
    assert max(run.end for run in ancestor.runs if run.alike) == whole
    receipt = here.edit(talk, [Directive(start=3, end=4)], [2]).receipt
    assert receipt.reason is None
    assert [(s.start, s.end) for s in receipt.segments if s.delta == -11] == [(19, whole - 1)]


@pytest.mark.parametrize("page", [16, 64])
def test_a_splice_leaves_no_page_partly_filled(page: int):
    """Dropping whole pages only would keep every page that one kept token is in; a splice fills page after page."""
    from leyline_server_ext import compat
    from leyline_server_ext.turns import Turn

    here = office(page, tokens=4096)
    talk = here.open(None)
    here.edit(talk, [], (TEXT * 4)[:1999])
    drops = [Directive(start=start, end=start + 30) for start in range(50, 1990, 100)]
    turn = Turn(talk.session, here.facts)
    turn.plan_directives(drops, [])
    target = turn.plan.target.tolist()
    request = here.world.request(
        target,
        extra_key=here.world.sealer.seal_lineage(turn.plan.lineage, None, None),
        custom={"leyline": here.world.sealer.seal_order(turn.plan.order, None)},
    )
    here.world.admit(request)
    assert here.world.extend(request, len(target))
    total, free, _ = compat.pool_counts(here.world.cache)
    slots = total - free
    assert slots == -(-len(target) // page) * page, "the source is gone and the view is gapless"
    kept = {p // page for p in range(2001) if not any(d.start <= p < d.end for d in drops)}
    assert len(kept) * page > 1.2 * slots, "what dropping whole pages alone would have left"
    here.world.release(request)
    here.world.check()


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Rows that each kernel is given from now on."""
    from leyline_server_ext import graft

    rows = {"splice": 0, "rotate_in_place": 0}
    for name in rows:

        def counting(layout: Any, slots: Any, *more: Any, name: str, kernel: Any, **vouched: bool) -> None:
            rows[name] += len(slots)
            kernel(layout, slots, *more, **vouched)

        monkeypatch.setattr(graft, name, partial(counting, name=name, kernel=getattr(graft, name)))
    return rows


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize(("core", "kind"), KINDS)
@pytest.mark.parametrize("aligned", [True, False])
def test_what_moves_by_whole_pages_is_turned_where_it_lies(
    page: int, core: str, kind: str, aligned: bool, monkeypatch: pytest.MonkeyPatch
):
    here = office(page, core, kind)
    talk = here.open(None)
    here.edit(talk, [], TEXT[:400])
    rows = counted(monkeypatch)
    start = 2 * page + 3 * (page > 1 and not aligned)
    receipt = here.edit(talk, [Directive(start=start, end=start + 2 * page)], [1]).receipt
    assert receipt.reason is None
    # Only the page that the edit starts in holds tokens that keep their place beside tokens that move.
    copied = page if start % page else 0
    assert (rows["splice"], receipt.slots_allocated) == (copied, copied)
    assert rows["rotate_in_place"] == (401 // page - 4) * page - copied
    assert receipt.slots_released == 2 * page + copied
    here.world.check()


@pytest.mark.parametrize("page", [16, 64])
def test_a_replacement_as_long_as_what_it_replaces_moves_nothing(page: int, monkeypatch: pytest.MonkeyPatch):
    here = office(page)
    talk = here.open(None)
    here.edit(talk, [], TEXT[:400])
    rows = counted(monkeypatch)
    receipt = here.edit(talk, [Directive(start=20, end=40, replacement=(9,) * 20)], [1]).receipt
    assert receipt.reason is None
    assert (receipt.executed, receipt.rotated_tokens) == (Executed.AMORTIZE, 0)
    # Of the pages that hold some of the replacement, its internal prefill has filled all but the last already.
    assert 0 < rows["splice"] <= {16: 32, 64: 64}[page]
    assert rows["rotate_in_place"] == {16: 22 * 16, 64: 5 * 64}[page]
    assert here.world.cache.evictable_size() == (len(talk.ids) - 1) // page * page


@pytest.mark.parametrize("page", [1, 16])
def test_what_somebody_else_holds_is_copied(page: int, monkeypatch: pytest.MonkeyPatch):
    here = office(page)
    talk = here.open(None)
    here.edit(talk, [], TEXT[:400])
    reader = here.world.request(TEXT[:390])
    here.world.admit(reader)
    rows = counted(monkeypatch)
    receipt = here.edit(talk, [Directive(start=2 * page, end=4 * page)], [1]).receipt
    assert receipt.reason is None
    assert rows["rotate_in_place"] == 0
    assert rows["splice"] == receipt.slots_allocated > 300
    here.world.step_back(reader)
    here.world.check()


@pytest.mark.parametrize("end", [36, 40], ids=["in place", "copied"])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(("core", "kind"), KINDS)
def test_a_kernel_that_fails_leaves_nothing_behind(
    page: int, core: str, kind: str, end: int, monkeypatch: pytest.MonkeyPatch
):
    here = office(page, core, kind)
    talk = here.open(None)
    here.edit(talk, [], TEXT[:200])
    request = doomed(here, talk, end, monkeypatch)
    here.world.admit(request)
    assert request.customized_info["leyline"][0]["reason"] == Reason.INTERNAL_ERROR
    assert request.extra_key is None, "what is prefilled now is clean"
    here.world.step_back(request)
    here.world.check()


def doomed(here: Any, talk: Any, end: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The request of a turn that takes ``[20, end)`` out of ``talk``, when every kernel fails."""
    from leyline_server_ext import graft
    from leyline_server_ext.turns import Turn

    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of memory on this rank")

    monkeypatch.setattr(graft, "splice", fails)
    monkeypatch.setattr(graft, "rotate_in_place", fails)
    turn = Turn(talk.session, here.facts)
    turn.plan_directives([Directive(start=20, end=end)], [1])
    return here.world.request(
        turn.plan.target.tolist(),
        extra_key=here.world.sealer.seal_lineage(turn.plan.lineage, None, None),
        custom={"leyline": here.world.sealer.seal_order(turn.plan.order, None)},
    )


def test_a_fault_is_not_hidden_where_other_ranks_have_grafted(monkeypatch: pytest.MonkeyPatch):
    here = office(1, "python", "mha")
    talk = here.open(None)
    here.edit(talk, [], TEXT[:60])
    monkeypatch.setattr(here.world.cache.leyline_grafter, "_ranks", 2)
    request = doomed(here, talk, 30, monkeypatch)
    with pytest.raises(RuntimeError, match="this rank"):
        here.world.admit(request)


@pytest.mark.parametrize("page", [1, 16])
def test_a_full_pool_is_used_as_far_as_it_goes(page: int):
    """Another request holds the rest of the pool: the part there is room for is spliced, the rest prefilled later."""
    here = office(page, tokens=480)
    talk = here.open(None)
    here.edit(talk, [], TEXT[:200])
    hog = here.world.request(list(range(100, 300)))
    here.world.admit(hog)
    assert here.world.extend(hog, 200)
    from leyline_server_ext.turns import Turn

    turn = Turn(talk.session, here.facts, keep_source=True)
    turn.plan_directives([Directive(start=20, end=40)], [1])
    request = here.world.request(
        turn.plan.target.tolist(),
        extra_key=here.world.sealer.seal_lineage(turn.plan.lineage, None, None),
        custom={"leyline": here.world.sealer.seal_order(turn.plan.order, None)},
    )
    here.world.admit(request)
    report = request.customized_info["leyline"][0]
    assert report["reason"] == Reason.POOL_EXHAUSTED
    assert 20 < request.prefix_len < 170
    here.world.step_back(request)
    here.world.release(hog, aborted=True)
    # Not admitted that time. At the next attempt there is room, and nothing has been given up.
    here.world.admit(request)
    assert "reason" not in request.customized_info["leyline"][0]
    assert request.prefix_len >= turn.plan.order.pieces[-1].end
    here.world.step_back(request)
    here.world.check()


def test_an_edit_that_somebody_made_before_is_found_cached_with_its_generation():
    here = office()
    for turn in range(2):
        talk = here.open(None)
        here.edit(talk, [], TEXT[:200])
        receipt = here.edit(talk, [Directive(start=20, end=40, replacement=(5,))], [1]).receipt
        assert receipt.generation == 1
        assert receipt.reason is None
        assert (receipt.slots_allocated or receipt.graft_ms > 0) == (turn == 0)


def test_no_kv_crosses_a_cache_salt():
    """An order sealed for one salt, with a source that only another salt has cached."""
    here = office()
    here.edit(here.open("a"), [], TEXT[:200])
    talk = here.open("b")
    here.edit(talk, [], TEXT[:200])
    here.world.cache.reset()
    here.world.allocator.clear()
    here.edit(here.open("a"), [], TEXT[:200])
    receipt = here.edit(talk, [Directive(start=20, end=40)], [1]).receipt
    assert receipt.reason is Reason.SOURCE_NOT_CACHED
    assert receipt.cached_tokens == 0


@pytest.mark.parametrize("page", [1, 16])
def test_forget_leaves_nothing_that_was_computed_from_the_span(page: int):
    here = office(page)
    talk = here.open(None)
    here.edit(talk, [], TEXT[:200])
    here.edit(talk, [Directive(start=100, end=120)], [1], keep=True)
    info = here.edit(talk, [Directive(start=30, end=40, mode="forget")], [1])
    assert info.receipt.kept_by_others == 0
    assert info.receipt.dropped_tokens > 250
    assert here.world.cache.evictable_size() == (len(talk.ids) - 1) // page * page


def test_a_hundred_edits_with_kept_sources_are_rotated_once():
    """bf16: the keys after a hundred edited turns are as good as after one (design §4)."""
    import torch

    errors = {}
    for edits in (1, 101):
        here = office(tokens=8000, dtype=torch.bfloat16)
        talk = here.open(None)
        here.edit(talk, [], TEXT[:300])
        for number in range(edits):
            # The text after the front moves by one every time: back and forth, in sum not far.
            change = Directive(start=2, end=3) if number % 2 else Directive(start=2, end=2, replacement=(4,))
            receipt = here.edit(talk, [change], [], keep=True, new_tokens=1).receipt
            assert receipt.reason is None
        # What a turn generated is held by its own view alone, and of those not all are asked; the text is.
        assert (receipt.segments[0].delta, receipt.segments[0].generation) == (1, 1)
        assert receipt.segments[0].end > 290
        errors[edits] = drift(here, talk)
    assert 0 < errors[101] <= 1.1 * errors[1]


def drift(here: Any, talk: Any) -> float:
    """Relative L2 error of the keys of the first 290 tokens of the conversation's view."""
    import torch
    from kv_world import LAYERS

    from leyline_server_ext.orders import Source

    world = here.world
    view, paths = talk.session.memory.view, world.cache.leyline_grafter._paths
    like = world.request([1])
    length, node = paths.match(paths.key(Source(view.ids, view.lineage), like))
    slots = paths.slots(node)[10:290]
    contents, positions = torch.tensor(talk.contents[10:290]), torch.arange(10, 290)
    assert length >= 290
    off = total = 0.0
    for layer in range(LAYERS):
        band, _ = world._planes(layer)
        exact = world._band(contents, positions, layer)[:, None]
        off += float((band[slots].double() - exact).square().sum())
        total += float(exact.square().sum()) * band.shape[1]
    return (off / total) ** 0.5
