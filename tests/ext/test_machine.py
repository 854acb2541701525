"""A state machine over SGLang's real cache, pools and requests against the plain-list model of `kv_model`."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from leyline_client._models import Directive, Mode

TOKENS = {1: 500, 16: 960, 64: 2560}
"""Pool size by page size: a few conversations fit, not all of them."""
SCALE = {1: 1, 16: 2, 64: 5}
FEW, MANY = (
    int(os.environ.get("LEYLINE_MACHINE_EXAMPLES", "40")),
    int(os.environ.get("LEYLINE_NIGHTLY_EXAMPLES", "400")),
)

# A small vocabulary: equal runs, and keys that meet again, are the rule.
tokens = st.integers(1, 5)
texts = st.builds(
    lambda seed, length: [1 + (i * i * seed + i // 3) % 5 for i in range(length)], st.integers(0, 9), st.integers(1, 40)
)
quiet: st.SearchStrategy[dict[str, Any]] = st.just({})
disturbances = st.one_of(
    quiet,
    quiet,
    st.fixed_dictionaries({"chunks": st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple)}),
    st.fixed_dictionaries({"abort": st.sampled_from(["before_match", "after_match", "mid_prefill", "streaming"])}),
    st.fixed_dictionaries({"evictions": st.lists(st.integers(0, 100), min_size=1, max_size=2).map(tuple)}),
    st.fixed_dictionaries({"retract": st.integers(1, 200)}),
    st.fixed_dictionaries({"retract": st.integers(1, 200), "chunks": st.just((1, 2))}),
)


class Machine(RuleBasedStateMachine):
    """Conversations that share prefixes, are edited in every way, and meet memory pressure and aborts."""

    page: int
    core: str
    kind: str

    def __init__(self) -> None:
        super().__init__()
        from conversations import Office, Talk
        from kv_world import World

        self.world = World(page=self.page, kind=self.kind, core=self.core, tokens=TOKENS[self.page])
        self.office = Office(self.world)
        self.talks: list[Talk] = []

    def _plan(self, wanted: dict[str, Any]) -> Any:
        from kv_world import Disturbance

        return Disturbance(**wanted)

    def _long(self, text: list[int]) -> list[int]:
        return (text * SCALE[self.page]) if self.page > 1 else text

    def _pick(self, data: st.DataObject) -> Any:
        return data.draw(st.sampled_from(self.talks), label="talk")

    @initialize(text=texts)
    def first(self, text: list[int]) -> None:
        self.begin(text, None)

    @rule(text=texts, salt=st.sampled_from([None, "a"]))
    def begin(self, text: list[int], salt: str | None) -> None:
        """Every conversation starts with the same tokens, and sooner or later differs."""
        assume(len(self.talks) < 4)
        talk = self.office.open(salt)
        head = [1, 2, 3, 4] * (6 * SCALE[self.page])
        if self.office.edit(talk, [], head + self._long(text)) is not None:
            self.talks.append(talk)

    @precondition(lambda self: self.talks)
    @rule(data=st.data(), text=texts, wanted=disturbances)
    def append(self, data: st.DataObject, text: list[int], wanted: dict[str, Any]) -> None:
        talk = self._pick(data)
        assume(len(talk.ids) < TOKENS[self.page] // 3)
        self.office.edit(talk, [], self._long(text), plan=self._plan(wanted))

    @precondition(lambda self: self.talks)
    @rule(data=st.data(), wanted=disturbances, keep=st.booleans(), append=st.lists(tokens, max_size=8))
    def edit(self, data: st.DataObject, wanted: dict[str, Any], keep: bool, append: list[int]) -> None:
        talk = self._pick(data)
        directives = data.draw(directives_for(len(talk.ids), self.page), label="directives")
        left = len(talk.ids) + sum(d.delta for d in directives) + len(append)
        assume(2 <= left < TOKENS[self.page] // 2)
        self.office.edit(talk, directives, append, keep=keep, plan=self._plan(wanted))

    @precondition(lambda self: self.talks)
    @rule(data=st.data(), wanted=disturbances)
    def delete(self, data: st.DataObject, wanted: dict[str, Any]) -> None:
        """One deletion that something follows."""
        talk = self._pick(data)
        length = len(talk.ids)
        assume(length > 8)
        start = data.draw(st.integers(0, length * 3 // 4), label="start")
        size = data.draw(st.integers(1, max(1, length // 5)), label="size")
        self.office.edit(talk, [Directive(start=start, end=min(start + size, length))], [5, 5], plan=self._plan(wanted))

    @precondition(lambda self: self.talks)
    @rule(data=st.data(), mode=st.sampled_from(Mode), wanted=disturbances, keep=st.booleans())
    def rewrite(self, data: st.DataObject, mode: Mode, wanted: dict[str, Any], keep: bool) -> None:
        """The agent sends another history than the session holds."""
        talk = self._pick(data)
        ids = talk.ids
        start = data.draw(st.integers(0, len(ids)), label="start")
        end = data.draw(st.integers(start, len(ids)), label="end")
        target = ids[:start] + data.draw(st.lists(tokens, max_size=20), label="instead") + ids[end:] + [1]
        assume(len(target) > 1)
        self.office.rewrite(talk, target, mode, keep=keep, plan=self._plan(wanted))

    @precondition(lambda self: self.talks)
    @rule(data=st.data(), more=st.integers(1, 30))
    def cut_and_edit(self, data: st.DataObject, more: int) -> None:
        """Edits in peace with kept sources, between them the end of the history taken back: nothing to splice there."""
        talk = self._pick(data)
        length = len(talk.ids)
        assume(20 < length < TOKENS[self.page] // 4)
        start = data.draw(st.integers(1, length // 4), label="first edit")
        self.office.edit(talk, [Directive(start=start, end=start + 2)], [5], keep=True)
        end = data.draw(st.integers(length // 2, len(talk.ids)), label="cut")
        self.office.rewrite(talk, [*talk.ids[:end], *[6] * (more * SCALE[self.page])], Mode.AMORTIZE, keep=True)
        start = data.draw(st.integers(1, length // 4), label="last edit")
        self.office.edit(talk, [Directive(start=start, end=start, replacement=(5,) * (more % 3 + 1))], [])

    @precondition(lambda self: any(talk.earlier for talk in self.talks))
    @rule(data=st.data())
    def undo(self, data: st.DataObject) -> None:
        self.office.undo(data.draw(st.sampled_from([talk for talk in self.talks if talk.earlier])))

    @precondition(lambda self: self.talks)
    @rule(data=st.data())
    def purge(self, data: st.DataObject) -> None:
        self.office.purge(self._pick(data))

    @precondition(lambda self: self.talks)
    @rule(data=st.data(), salt=st.sampled_from([None, "a"]))
    def clean(self, data: st.DataObject, salt: str | None) -> None:
        """Somebody without a session sends the very tokens of an edited conversation."""
        self.office.clean(self._pick(data).ids, salt)

    @rule(tokens=st.integers(1, 150))
    def evict(self, tokens: int) -> None:
        self.world.evict(tokens)

    @rule()
    def flush(self) -> None:
        """As the scheduler does for ``flush_cache``."""
        self.world.cache.reset()
        self.world.allocator.clear()
        self.world.rows.clear()

    @invariant()
    def conserved(self) -> None:
        self.world.check()


@st.composite
def directives_for(draw: st.DrawFn, length: int, page: int) -> list[Directive]:
    """One to four directives: deletions, insertions, replacements shorter and longer than what they replace."""
    edges = sorted(draw(st.lists(st.integers(0, length), min_size=2, max_size=8, unique=True)))
    found = []
    for start, end in zip(edges[0::2], edges[1::2], strict=False):
        end = start if draw(st.integers(0, 5)) == 0 else min(end, start + max(4, length // 6))
        whole = (end - start) % page  # what follows moves by whole pages
        size = draw(st.sampled_from([0, 0, 1, 3, 12 * (page > 1), end - start, end - start + 2, whole, whole + page]))
        text = [1 + (i * i + size) % 5 for i in range(size)]
        if end > start or text:
            mode = Mode.FORGET if draw(st.integers(0, 9)) == 9 else Mode.AMORTIZE
            found.append(Directive(start=start, end=end, replacement=tuple(text), mode=mode))
    assume(found)
    return found


def explore(page: int, core: str, kind: str, examples: int) -> None:
    machine = type("Chosen", (Machine,), {"page": page, "core": core, "kind": kind})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=12,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.reuse, Phase.generate, Phase.shrink],
            print_blob=True,
        ),
    )


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize(("core", "kind"), [("rust", "mla"), ("python", "mha")])
def test_machine(page: int, core: str, kind: str) -> None:
    explore(page, core, kind, FEW)


@pytest.mark.slow
@pytest.mark.usefixtures("engine")
@pytest.mark.skipif("LEYLINE_NIGHTLY" not in os.environ, reason="thousands of examples: set LEYLINE_NIGHTLY=1")
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize("kind", ["mla", "mha"])
def test_machine_nightly(page: int, core: str, kind: str) -> None:
    explore(page, core, kind, MANY)
