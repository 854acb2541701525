"""The certificate: after a forget that says nothing was kept, nothing cached was computed from the forgotten text.

One conversation alone, so that whatever is cached is its own: turns that came to nothing, views undone and cut.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from leyline_client._models import Directive, Mode

pytestmark = pytest.mark.usefixtures("engine")

KINDS = [("rust", "mla"), ("python", "mha")]
ABORTS = ["before_match", "after_match", "mid_prefill", "streaming"]


def office(page: int, core: str = "rust", kind: str = "mla", tokens: int = 5120) -> Any:
    from conversations import Office
    from kv_world import World

    return Office(World(page=page, kind=kind, core=core, tokens=tokens))


def disturbed(abort: str | None, **more: Any) -> Any:
    from kv_world import Disturbance

    return Disturbance(abort=abort, chunks=(2,) if abort == "mid_prefill" else (), **more)


def must_be_clean(here: Any, talk: Any, forgotten: set[int]) -> None:
    """Nothing that was computed from ``forgotten`` is cached."""
    tainted = here.world.influenced_by(forgotten - set(talk.contents)) & here.world.cached()
    assert not tainted, f"{len(tainted)} rows"
    here.world.check()


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("abort", ABORTS)
def test_a_turn_that_came_to_nothing_is_forgotten_with_the_text(page: int, abort: str):
    """Its second replacement attends to text that attended to what is forgotten, and nobody holds that."""
    here = office(page)
    talk = here.open(None)
    here.edit(talk, [], [1 + i % 7 for i in range(400)])
    edits = [Directive(start=90, end=120, replacement=(8,) * 9), Directive(start=250, end=260, replacement=(9,) * 70)]
    assert here.edit(talk, edits, [3] * 5, new_tokens=40, plan=disturbed(abort)) is None
    forgotten = set(talk.contents[90:120])
    assert here.world.influenced_by(forgotten) & here.world.cached()
    receipt = here.edit(talk, [Directive(start=90, end=120, mode=Mode.FORGET)], [4]).receipt
    assert receipt.kept_by_others == 0
    assert receipt.dropped_tokens > 0
    must_be_clean(here, talk, forgotten)
    assert here.world.cache.evictable_size() == (len(talk.ids) - 1) // page * page
    assert talk.session.strays == ()


@pytest.mark.parametrize("page", [1, 16])
def test_an_undone_edit_is_forgotten_with_the_text(page: int):
    here = office(page)
    talk = here.open(None)
    here.edit(talk, [], [1 + i % 7 for i in range(300)])
    here.edit(talk, [Directive(start=60, end=80, replacement=(8,) * 20)], [3], keep=True)
    here.undo(talk)
    forgotten = set(talk.contents[60:80])
    receipt = here.edit(talk, [Directive(start=60, end=80, mode=Mode.FORGET)], [4]).receipt
    assert receipt.kept_by_others == 0
    must_be_clean(here, talk, forgotten)


@pytest.mark.parametrize("page", [1, 16])
def test_a_retry_finds_what_the_aborted_turn_made_before_a_forget(page: int):
    """One batch amortizes and forgets: what it drops is not what it has just prefilled for itself."""
    here = office(page)
    talk = here.open(None)
    here.edit(talk, [], [1 + i % 7 for i in range(400)])
    edits = [
        Directive(start=90, end=120, replacement=(8,) * 40),
        Directive(start=350, end=360, mode=Mode.FORGET),
    ]
    assert here.edit(talk, edits, [3], plan=disturbed("streaming")) is None
    receipt = here.edit(talk, edits, [3]).receipt
    assert receipt.reason is None
    assert receipt.prefilled_tokens < 60 + 3 * page


@pytest.mark.parametrize("page", [1, 16])
def test_text_before_an_edit_that_moves_later_is_forgotten_in_the_view_kept_from_then(page: int):
    here = office(page)
    talk = here.open(None)
    here.edit(talk, [], [1 + i % 7 for i in range(400)])
    here.edit(talk, [Directive(start=300, end=310)], [3], keep=True)
    here.edit(talk, [Directive(start=10, end=15)], [3])
    forgotten = set(talk.contents[150:160])
    receipt = here.edit(talk, [Directive(start=150, end=160, mode=Mode.FORGET)], [4]).receipt
    assert receipt.kept_by_others == 0
    must_be_clean(here, talk, forgotten)


def half_evicted(page: int) -> tuple[Any, Any]:
    """A conversation whose later half has gone from the cache."""
    here = office(page)
    talk = here.open(None)
    here.edit(talk, [], [1 + i % 7 for i in range(160)], new_tokens=1)
    here.edit(talk, [], [2 + i % 5 for i in range(160)])
    here.world.evict(100)
    assert 0 < here.world.cache.evictable_size() <= 160
    return here, talk


@pytest.mark.parametrize("page", [1, 16])
def test_text_is_forgotten_in_the_view_before_an_edit_that_was_spliced_in_part(page: int):
    """What the new view could not take from the earlier one the earlier one has all the same."""
    here, talk = half_evicted(page)
    receipt = here.edit(talk, [Directive(start=10, end=20)], [3], keep=True).receipt
    assert receipt.reason is not None
    forgotten = set(talk.contents[30:40])
    assert forgotten & here.world.cached()
    receipt = here.edit(talk, [Directive(start=30, end=40, mode=Mode.FORGET)], [4]).receipt
    assert receipt.kept_by_others == 0
    must_be_clean(here, talk, forgotten)


@pytest.mark.parametrize("page", [1, 16])
def test_what_was_prefilled_on_a_part_of_a_splice_is_forgotten_when_the_client_went_away(page: int):
    here, talk = half_evicted(page)
    assert here.edit(talk, [Directive(start=10, end=20)], [3], plan=disturbed("streaming")) is None
    forgotten = set(talk.contents[10:20])
    receipt = here.edit(talk, [Directive(start=10, end=20, mode=Mode.FORGET)], [4]).receipt
    assert receipt.kept_by_others == 0
    must_be_clean(here, talk, forgotten)


def test_what_nobody_names_any_more_is_released_in_time():
    """Turn after turn comes to nothing: the list is bounded, and the next complete turn frees what it holds."""
    from leyline_server_ext.strays import LIMIT, MOST

    here = office(1)
    talk = here.open(None)
    here.edit(talk, [], [1 + i % 7 for i in range(50)])
    for number in range(LIMIT + 1):
        assert here.edit(talk, [], [10 + number] * 30, plan=disturbed("streaming")) is None
    assert LIMIT < len(talk.session.strays) <= MOST
    here.edit(talk, [], [5])
    assert talk.session.strays == ()
    assert here.world.cache.evictable_size() == len(talk.ids) - 1


@pytest.mark.parametrize("page", [1, 16])
def test_a_source_that_could_not_be_released_is_purged(page: int):
    """The pool was full and the splice did not happen: the evicted text is still cached, under no view's key."""
    here = office(page, tokens=480)
    talk = here.open(None)
    here.edit(talk, [], [1 + i % 7 for i in range(150)])
    here.edit(talk, [Directive(start=20, end=40)], [1], keep=True)
    hog = here.world.request(list(range(100, 230)))
    here.world.admit(hog)
    assert here.world.extend(hog, 130)
    here.edit(talk, [Directive(start=30, end=40)], [1])
    here.world.release(hog, keep=False)
    report = here.purge(talk)
    assert report["kept"] == 0
    assert here.world.cached() <= set(talk.contents)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["append", "edit", "edit", "edit", "undo", "cut"]),
        st.sampled_from([None, None, *ABORTS]),
        st.booleans(),
        st.randoms(use_true_random=False),
    ),
    min_size=1,
    max_size=6,
)


def step(here: Any, talk: Any, what: str, abort: str | None, keep: bool, random: Any, fresh: Any) -> None:
    length = len(talk.ids)
    if what == "undo":
        if talk.earlier:
            here.undo(talk)
    elif what == "cut":
        cut = random.randrange(length // 2, length)
        here.rewrite(talk, [*talk.ids[:cut], next(fresh)], Mode.FORGET, plan=disturbed(abort))
    elif what == "append":
        here.edit(talk, [], [next(fresh)] * random.randrange(1, 40), plan=disturbed(abort), new_tokens=20)
    else:
        edges = sorted(random.sample(range(length), 2 * random.randrange(1, 4)))
        edits = [
            Directive(start=a, end=b, replacement=(next(fresh),) * random.choice([0, 0, 1, 30]))
            for a, b in zip(edges[0::2], edges[1::2], strict=True)
        ]
        here.edit(talk, edits, [next(fresh)], keep=keep, plan=disturbed(abort))


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(("core", "kind"), KINDS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(steps=STEPS, data=st.data())
def test_after_any_history_nothing_of_the_forgotten_is_left(
    steps: Any, data: st.DataObject, page: int, core: str, kind: str
):
    """Whatever the receipt counts as kept: with one conversation it can only be what the new text has as well."""
    import kv_model

    here, fresh = office(page, core, kind), itertools.count(10)
    talk = here.open(None)
    here.edit(talk, [], [1 + i % 7 for i in range(250)])
    for what, abort, keep, random in steps:
        step(here, talk, what, abort, keep, random, fresh)
        assume(len(talk.ids) > 20)
    start = data.draw(st.integers(0, len(talk.ids) - 10), label="start")
    end = data.draw(st.integers(start + 1, len(talk.ids) - 5), label="end")
    forgotten = set(talk.contents[start:end])
    if data.draw(st.booleans(), label="purge"):
        here.purge(talk)
        # The last token was sampled; an aborted turn may have fed it.
        assert here.world.cached() <= set(kv_model.prefill([], talk.ids))
        return
    here.edit(talk, [Directive(start=start, end=end, mode=Mode.FORGET)], [next(fresh)])
    must_be_clean(here, talk, forgotten)
