"""Asks policies in order, refuses plans that break a rule, and returns what is new."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from leyline_client._errors import PolicyError, PolicyRuleError
from leyline_client._models import MAX_DIRECTIVES, Edit

from ._base import Policy
from ._facts import FactsCache
from ._rules import check_plan, check_result
from ._settle import settle
from ._tokens import ESTIMATE, TokenCounter
from ._transcript import Transcript

_log = logging.getLogger("leyline.policy")


class PolicySet:
    """Policies in order: each sees what the ones before it edit in the same turn as already standing.

    Holds no state of any conversation, only a bounded cache of facts about messages; one set may serve many
    conversations and threads.
    """

    def __init__(self, policies: Sequence[Policy], *, counter: TokenCounter | None = None) -> None:
        self.policies = tuple(policies)
        self.counter = counter or ESTIMATE
        self._cache = FactsCache(self.counter)
        self._lock = threading.Lock()

    def plan(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        standing: Sequence[Edit] = (),
        token_counts: Sequence[int] | None = None,
        attention: Sequence[Sequence[float]] | None = None,
        texts: Sequence[str] | None = None,
    ) -> list[Edit]:
        """The new edits for this turn: none repeats, overlaps or takes back one of ``standing``.

        ``messages`` is the whole history as the agent wrote it, ``standing`` what earlier calls returned for it.
        ``texts`` is the JSON of each message, for callers that have it anyway: looking that up is what makes a turn
        cheap; ``messages`` must then be plain dicts. ``token_counts`` are exact tokens per message where known (see
        `Transcript`). ``standing + result`` never exceeds the protocol's limit of edits: plans beyond it are left out
        and logged.

        Raises:
            PolicyRuleError: a plan breaks a rule; ``rule`` names it.
            PolicyError: a policy raised.
        """
        if not self.policies:
            return []
        transcript = self.transcript(
            messages, tools=tools, standing=standing, token_counts=token_counts, attention=attention, texts=texts
        )
        new: list[Edit] = []
        for policy in self.policies:
            wanted = self._ask(policy, transcript, messages)
            if not wanted:
                continue
            check_plan(policy, transcript, wanted)
            fresh = settle(transcript, wanted)
            if not fresh:
                continue
            if len(transcript.standing) + len(fresh) > MAX_DIRECTIVES:
                _log.warning(
                    "policy %s: its edits are left out, the limit of %d is reached", policy.name, MAX_DIRECTIVES
                )
                continue
            transcript = transcript.with_edits(fresh)
            check_result(policy, transcript, fresh)
            new += fresh
        return sorted(new, key=_place)

    def transcript(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        standing: Sequence[Edit] = (),
        token_counts: Sequence[int] | None = None,
        attention: Sequence[Sequence[float]] | None = None,
        texts: Sequence[str] | None = None,
    ) -> Transcript:
        """The view that the policies get, on this set's counter and cache."""
        with self._lock:
            return Transcript(
                messages,
                tools=tools,
                standing=standing,
                token_counts=token_counts,
                attention=attention,
                cache=self._cache,
                texts=texts,
            )

    def _ask(self, policy: Policy, transcript: Transcript, messages: Sequence[Any]) -> list[Edit]:
        wanted = _plan(policy, transcript)
        if not wanted:
            return wanted
        # Asking twice only where there is an answer keeps the usual turn cheap.
        again = _plan(policy, transcript)
        if wanted != again:
            spans = [[(*_place(edit), edit.end, edit.mode) for edit in plan] for plan in (wanted, again)]
            rule = "byte-stable" if spans[0] == spans[1] else "deterministic"
            raise PolicyRuleError("planning twice gave different edits", policy=policy.name, rule=rule)
        if not transcript.unchanged(messages):
            raise PolicyRuleError("planning changed the messages", policy=policy.name, rule="pure")
        return wanted


def plan_in_order(policies: Sequence[Policy], transcript: Transcript) -> list[Edit]:
    """The new edits of several policies, each seeing those before it as standing: what a composite policy returns.

    Raises PolicyRuleError naming the policy inside, where its plan breaks a rule.
    """
    new: list[Edit] = []
    for policy in policies:
        wanted = _plan(policy, transcript)
        check_plan(policy, transcript, wanted)
        fresh = settle(transcript, wanted)
        if fresh:
            transcript = transcript.with_edits(fresh)
            new += fresh
    return new


def _plan(policy: Policy, transcript: Transcript) -> list[Edit]:
    try:
        plan = policy.plan(transcript)
    except PolicyError:
        raise
    except Exception as error:
        raise PolicyError(f"raised {type(error).__name__}: {error}", policy=policy.name) from error
    if isinstance(plan, str | bytes) or not isinstance(plan, Sequence):
        raise PolicyRuleError(f"returned {type(plan).__name__}", policy=policy.name, rule="edits")
    for edit in plan:
        if not isinstance(edit, Edit):
            raise PolicyRuleError(f"returned a {type(edit).__name__} among its edits", policy=policy.name, rule="edits")
    return list(plan)


def _place(edit: Edit) -> tuple[int, str, int, int]:
    return (edit.message, edit.part.value, edit.call, edit.start or 0)
