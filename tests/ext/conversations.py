"""Conversations over a `World`, edited through the extension's own turns, beside the plain-list model of their KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import kv_model
from kv_world import Aborted, Disturbance, Manager, World, drive

from leyline_client._errors import Overloaded
from leyline_client._models import Directive, Mode, Reason, TurnInfo
from leyline_server_ext import compat
from leyline_server_ext.diff import diff
from leyline_server_ext.engine import Engine
from leyline_server_ext.purge import purge_order
from leyline_server_ext.receipts import Outcome
from leyline_server_ext.sessions import MAX_ANCESTORS, Session
from leyline_server_ext.turns import ServerFacts, Turn
from leyline_server_ext.views import Change, as_ids


@dataclass(repr=False)
class Talk:
    """A session, and what the model says its KV is."""

    session: Session
    contents: list[int] = field(default_factory=list)
    """Of every fed token of the session's view."""
    earlier: list[list[int]] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"{self.session.id} at {self.session.version}, {len(self.ids)} tokens"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # Hypothesis would print every field

    @property
    def ids(self) -> list[int]:
        return self.session.memory.view.ids.tolist()


class Office:
    """Serves conversations on a `World` as the HTTP side does, and checks every row that a request ends with."""

    def __init__(self, world: World) -> None:
        self.world, self.manager = world, Manager(world)
        self.engine = Engine(self.manager, world.sealer)
        self.facts = ServerFacts(world.page, 1 << 20, ())

    def open(self, salt: str | None) -> Talk:
        return Talk(Session(f"session-{next(self.world.numbers):012}", salt))

    def edit(
        self,
        talk: Talk,
        directives: Sequence[Directive],
        append: Sequence[int],
        *,
        keep: bool = False,
        new_tokens: int = 2,
        plan: Disturbance | None = None,
    ) -> TurnInfo | None:
        """A token-level turn; None where it was aborted."""
        turn = Turn(talk.session, self.facts, keep_source=keep)
        kept = len(talk.ids)
        turn.plan_directives(directives, append)
        return self._serve(talk, turn, kept, new_tokens, plan)

    def rewrite(
        self, talk: Talk, target: Sequence[int], mode: Mode, *, keep: bool = False, plan: Disturbance | None = None
    ) -> TurnInfo | None:
        """The agent sends another history."""
        turn = Turn(talk.session, self.facts, keep_source=keep)
        view = talk.session.memory.view
        hunks, kept = diff(view.ids, as_ids(target))
        turn._make(view, as_ids(target), [Change(hunk, mode, declared=False) for hunk in hunks], kept)
        return self._serve(talk, turn, kept, 2, plan)

    def _serve(self, talk: Talk, turn: Turn, kept: int, new_tokens: int, plan: Disturbance | None) -> TurnInfo | None:
        assert turn.plan is not None
        target, before, was = turn.plan.target.tolist(), talk.contents, talk.session.memory
        wanted = kv_model.edited(before, talk.ids, target, turn.changes, kept, self.world.page)
        self.manager.plan = plan or Disturbance()
        request = compat.openai().GenerateReqInput(
            input_ids=target, sampling_params={"max_new_tokens": new_tokens}, stream=False
        )
        try:
            drive(self._run(turn, request))
        except Aborted:
            turn.abandon()
            return None
        self._compare(turn, wanted)
        info = turn.finish(0.0)
        talk.contents = self.manager.contents
        if turn.keep_source and turn.plan.rotates:
            talk.earlier = [*talk.earlier, before][-MAX_ANCESTORS:]
        assert len(talk.session.earlier) == len(talk.earlier), was
        return info

    async def _run(self, turn: Turn, request: Any) -> None:
        await turn.prepare(self.engine, request)
        async for _ in self.engine.recorded(request, None, turn.outcome):
            pass

    def _compare(self, turn: Turn, wanted: list[int]) -> None:
        """Every row is what the model says, given where the reported lineage leaves the planned one."""
        assert turn.plan is not None
        report = turn.outcome.report
        assert report.get("reason") != Reason.INTERNAL_ERROR
        entries = tuple((p, s) for p, s in report["lineage"])
        if entries != turn.plan.lineage.entries:
            assert report["reason"]
            wanted = wanted[: report["until"] if entries else 0]
        elif turn.plan.rotates:
            assert "reason" not in report, report["reason"]
        fed = [*turn.plan.target.tolist(), *turn.outcome.output_ids][: len(self.manager.contents)]
        wanted = kv_model.prefill(wanted, fed)
        off = [p for p, (a, b) in enumerate(zip(self.manager.contents, wanted, strict=True)) if a != b]
        assert not off, f"{len(off)} wrong rows from {off[0]} on; {turn.plan.lineage}, {report}"
        covered = [(a, b) for a, b, _, _ in report["segments"]]
        assert all(b <= c for (_, b), (c, _) in pairwise(covered)), "segments overlap"

    def undo(self, talk: Talk) -> None:
        talk.session.undo(0.0, 1e9)
        talk.contents = talk.earlier.pop()

    def purge(self, talk: Talk) -> dict[str, Any] | None:
        """As `Service.purge`; the scheduler's report, or None where the engine took no request."""
        self.manager.plan = Disturbance()
        order, outcome = purge_order(talk.session), Outcome()
        if order.forget:
            try:
                outcome = drive(self.engine.carry(talk.session, order))
            except Overloaded:
                return None
        talk.session.purged(all_gone=not outcome.report.get("kept"), now=0.0)
        talk.contents, talk.earlier = kv_model.prefill([], talk.ids[: len(talk.contents)]), []
        return outcome.report

    def clean(self, ids: Sequence[int], salt: str | None, new_tokens: int = 1) -> None:
        """A request without a session: all of its KV is honest."""
        req = self.world.request(ids, salt=salt)
        try:
            contents = self.world.run(req, new_tokens, Disturbance())
        except Aborted:
            return
        fed = [*ids, *req.output_ids][: len(contents)]
        assert contents == kv_model.prefill([], fed), "a clean request reads spliced KV"
