"""One turn of a session: plan it, prefill its replacements, and remember what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from leyline_client._errors import InvalidDirective, InvalidRequest, Unsupported
from leyline_client._models import Directive, Edit, Mode, Reason, Receipt, TurnInfo, apply_directives
from leyline_client._wire import PartSpan

from .changes import OnHistoryEdit, classify, digest_messages, from_directives, history_extends
from .diff import common_prefix, diff
from .engine import Engine
from .lineage import Ids
from .orders import Source
from .plan import Ancestor, Change, Plan, View, as_ids, compose, make_plan
from .purge import with_purge
from .receipts import Outcome, actual_lineage, build_receipt
from .sessions import Memory, Session
from .strays import LIMIT, Strays, attempts, forgetting, joined, of_view, releasing, shared
from .views import Run, unlike_from, within


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the planner must know of the server."""

    page_size: int
    vocab_size: int
    refusals: tuple[str, ...]

    def require_known(self, ids: Sequence[int], param: str) -> None:
        """Raise `InvalidRequest` for a token the model has no embedding for: the engine would crash on it."""
        if ids and max(ids) >= self.vocab_size:
            raise InvalidRequest(f"token {max(ids)} is beyond the vocabulary of {self.vocab_size}", param=param)

    def require_splice(self) -> None:
        """Raise `Unsupported` where nothing may be spliced."""
        if self.refusals:
            code = self.refusals[0].partition(":")[0]
            raise Unsupported(
                f"this server cannot be spliced: {self.refusals[0]}",
                detail={"reason": code, "refusals": list(self.refusals)},
            )


@dataclass(slots=True)
class Turn:
    """A turn in progress; `finish` is called once, when the reply is complete."""

    session: Session
    facts: ServerFacts
    keep_source: bool = False
    purge: bool = False
    digests: tuple[bytes, ...] = ()
    edits: tuple[Edit, ...] = ()
    directives: tuple[Directive, ...] = ()
    """Message-level turns: standing token spans in what the unedited messages render to."""
    reason: Reason | None = None
    plan: Plan | None = None
    changes: list[Change] = field(default_factory=list)
    drift: int = 0
    outcome: Outcome = field(default_factory=Outcome)
    info: TurnInfo | None = None
    _strays: Strays = ()
    """The session's strays before this turn."""

    # --- planning -------------------------------------------------------------------------------------------------

    def plan_directives(self, directives: Sequence[Directive], append: Sequence[int]) -> None:
        """Token level: ``directives`` in the coordinates of the session's tokens, then ``append``.

        Raises:
            InvalidDirective: out of range, out of order or overlapping; the message names the index.
        """
        view = self._view()
        source = view.ids
        self.facts.require_known(append, "append")
        target = self._applied(source, directives) + list(append)
        self._make(view, as_ids(target), from_directives(directives), kept=len(source))

    def plan_messages(
        self,
        target: Ids,
        messages: Sequence[dict[str, Any]],
        on_history_edit: OnHistoryEdit,
        spans: Callable[[], Sequence[PartSpan]],
    ) -> None:
        """Message level: ``target`` is what the edited messages render to (`directives` are still to be applied)."""
        memory = self.session.memory
        self.digests = digest_messages(messages)
        if self.directives:
            target = as_ids(self._applied(target, self.directives))
        view = self._view()
        hunks, kept = diff(view.ids, target)
        extends = history_extends(memory.digests, self.digests)
        changes = classify(
            hunks,
            edits=(*self.edits, *self.directives),
            edits_before=memory.edits,
            extends=extends,
            on_history_edit=on_history_edit,
            spans=spans,
        )
        lost_from = changes[0].hunk.source_start if changes else kept
        # Where nothing was edited, template and tokeniser alone are to blame, also for a loss inside the last prompt.
        same = extends and len(self.digests) >= len(memory.digests)
        same = same and set(memory.edits) == {*self.edits, *self.directives}
        if (same or memory.prompt_length < lost_from) and lost_from < min(len(view.ids), len(target)):
            self.drift = len(view.ids) - lost_from
        self._make(view, target, changes, kept)

    def _applied(self, source: Ids, directives: Sequence[Directive]) -> list[int]:
        for index, directive in enumerate(directives):
            self.facts.require_known(directive.replacement, f"directives[{index}].replacement")
        try:
            return apply_directives(source.tolist(), tuple(directives))
        except ValueError as error:
            raise InvalidDirective(str(error), param=str(error).partition(":")[0]) from None

    def _view(self) -> View:
        """The session's view; with ``purge`` as if everything influenced had never been computed."""
        view = self.session.memory.view
        if not self.purge or view.lineage.first is None:
            return view
        return View(view.ids[: view.lineage.first])

    def _make(self, view: View, target: Ids, changes: list[Change], kept: int) -> None:
        if any(change.mode is Mode.AMORTIZE for change in changes):
            self.facts.require_splice()
        self.changes = changes
        memory = self.session.memory
        self.plan = make_plan(
            view,
            memory.ancestors if not self.purge else (),
            target,
            changes,
            kept=min(kept, len(view.ids)),
            page_size=self.facts.page_size,
            release=not self.keep_source,
        )
        self._strays = self.session.strays
        if self.purge:
            self.plan = with_purge(self.plan, self.session)
        elif self.plan.order.forget:
            lost = [view for view in self.session.views() if self._lost(view)]
            strays = joined(self._strays, map(of_view, lost))
            self.plan = replace(self.plan, order=forgetting(self.plan.order, strays, self._spared(lost)))
        elif len(self._strays) > LIMIT:
            self.plan = replace(self.plan, order=releasing(self.plan.order, self._strays, self._spared(())))

    def _lost(self, view: View) -> bool:
        """Whether ``view`` holds forgotten text, but nothing of what follows it in the session's current view."""
        memory = self.session.memory
        if view is memory.view or any(view is ancestor.view for ancestor in memory.ancestors):
            return False  # the planner sees to these
        start = next(change.hunk.source_start for change in self.changes if change.mode is Mode.FORGET)
        return start < shared(of_view(view), of_view(memory.view))

    def _spared(self, lost: Sequence[View]) -> list[Source]:
        """What no stray may take along: the session's views, and what this turn is going to make."""
        assert self.plan is not None
        views = [view for view in self.session.views() if not any(view is other for other in lost)]
        return [*map(of_view, views), *attempts(self.plan)]

    # --- running --------------------------------------------------------------------------------------------------

    async def prepare(self, engine: Engine, request: Any) -> None:
        """Prefill the replacements and address ``request`` (an engine request for the planned target)."""
        assert self.plan is not None
        self.session.strays = joined(self._strays, attempts(self.plan))
        self.outcome.warmed = await engine.warm(self.plan, self.session, request.extra_key)
        engine.address(request, self.session, self.plan.lineage, self.plan.order)

    def finish(self, now: float) -> TurnInfo:
        """The reply is complete: build the receipt and move the session on."""
        assert self.plan is not None
        receipt = build_receipt(self.plan, self.outcome, drift=self.drift, reason=self.reason)
        memory = self._next_memory(receipt)
        self.session.strays, gone = self._left_behind()
        self.session.advance(memory, keep=self.keep_source and self.plan.rotates, now=now, gone=gone)
        self.info = TurnInfo(session=self.session.id, version=self.session.version, receipt=receipt)
        return self.info

    def abandon(self) -> None:
        """The turn came to nothing, but what it generated may be cached."""
        if self.plan is not None and self.info is None and self.outcome.output_ids:
            ids = as_ids([*self.plan.target.tolist(), *self.outcome.output_ids])
            lineage = actual_lineage(self.plan, self.outcome.report)
            self.session.strays = joined(self.session.strays, [Source(ids, lineage)])

    def _left_behind(self) -> tuple[Strays, bool]:
        """The strays after this turn, and whether the KV of the view before it is gone from the cache."""
        assert self.plan is not None
        order, report, strays = self.plan.order, self.outcome.report, self._strays
        cleared, forgotten = report.get("cleared"), bool(order.forget) and report.get("kept") == 0
        if forgotten or (not order.forget and cleared is not None and len(strays) > LIMIT):
            strays = ()
        if not cleared and self.plan.warmups:
            strays = joined(strays, attempts(self.plan)[: len(self.plan.warmups)])
        if self.purge and self.session.memory.view.lineage.first is None:
            forgotten = False  # there was nothing to purge in it
        return strays, forgotten or (bool(cleared) and order.exclusive)

    def _next_memory(self, receipt: Receipt) -> Memory:
        assert self.plan is not None
        before, plan = self.session.memory, self.plan
        lineage = actual_lineage(plan, self.outcome.report)
        first = self.changes[0].hunk.source_start if self.changes else len(plan.target)
        stay = min(first, lineage.spliced_until)
        untouched = tuple((a, min(b, stay), g) for a, b, g in before.view.generations if a < stay)
        generations = untouched + tuple(
            (segment.start, segment.end, segment.generation) for segment in receipt.segments
        )
        view = View(
            as_ids([*plan.target.tolist(), *self.outcome.output_ids]),
            lineage,
            generations,
        )
        return Memory(
            view=view,
            prompt_length=len(plan.target),
            ancestors=self._ancestors(lineage.spliced_until),
            digests=self.digests,
            edits=(*self.edits, *self.directives),
        )

    def _ancestors(self, until: int) -> tuple[Ancestor, ...]:
        """Earlier views, seen from the next one. Only kept sources are worth remembering: others are released.

        From ``until`` on the next view's KV is prefilled: an earlier view may have the tokens, but not the same KV.
        Also where nothing could be spliced at all: a forget has to find the text in the view that `undo` goes back to.
        """
        assert self.plan is not None
        before, plan = self.session.memory, self.plan
        ancestors = compose(before.ancestors, self.changes, plan.runs)
        if not self.changes:
            ancestors = within(ancestors, common_prefix(before.view.ids, plan.target))
        if self.keep_source and plan.rotates and plan.runs:
            # What both have before the first change is named too: a later edit may move it, or forget it.
            stay = self.changes[0].hunk.source_start
            same = (Run(0, stay, 0),) if stay else ()
            ancestors = (*ancestors, Ancestor(before.view, (*same, *plan.runs)))
        return tuple(replace(a, runs=unlike_from(a.runs, until)) for a in ancestors)
