"""The conformance kit of policies: one line in a test of your own.

::

    def test_my_policy():
        check_policy(MyPolicy(turns=1))

The checks are made on what the edited conversation looks like, not with the code that refuses plans at run time.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from random import Random

from leyline_client._edits import apply_edits
from leyline_client._errors import PolicyRuleError
from leyline_client._models import Edit, Mode, Part
from leyline_client.policy import Policy, PolicySet, resolve

from ._corpus import Message, conversation, corpus, requests

SYSTEM = {"system", "developer"}
RESULT = {"tool", "function"}


class PolicyConformanceError(AssertionError):
    """A policy breaks a rule. ``rule`` names it, ``messages`` is the conversation in which it did."""

    def __init__(self, rule: str, why: str, messages: Sequence[Message]) -> None:
        roles = " ".join(str(message.get("role")) for message in messages)
        super().__init__(f"{rule}: {why}\nin a conversation of {len(messages)} messages: {roles}")
        self.rule = rule
        self.messages = list(messages)


def check_policy(policy: Policy, *, transcripts: Sequence[Sequence[Message]] | None = None, examples: int = 30) -> int:
    """Replays conversations turn by turn through ``policy`` and checks every rule after each turn.

    Without ``transcripts`` that is a fixed corpus of every shape of conversation, and, where Hypothesis is installed,
    ``examples`` more of its making. Returns the number of edits that were issued: 0 means the policy never acted,
    and that nothing was really checked (give it parameters that let it act on small conversations).

    Raises:
        PolicyConformanceError: an AssertionError that names the rule.
        PolicyError: the policy raised.
    """
    if transcripts is not None:
        return sum(replay([policy], list(messages)) for messages in transcripts)
    edits = sum(replay([policy], messages) for messages in corpus())
    _check_with_hypothesis(policy, examples)
    return edits


def _check_with_hypothesis(policy: Policy, examples: int) -> None:
    try:
        from hypothesis import HealthCheck, Phase, given, settings
        from hypothesis import strategies as st
    except ImportError:
        return

    # Shrinking a source of random numbers takes long and does not make the conversation much simpler.
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(st.randoms(use_true_random=False))
    def check(random: Random) -> None:
        replay([policy], conversation(random))

    check()


def replay(policies: Sequence[Policy], messages: list[Message]) -> int:
    """One conversation, turn by turn, every rule checked. Returns the number of edits issued."""
    planner = resolve(list(policies))
    standing: list[Edit] = []
    planned: list[tuple[_Turn, list[Edit]]] = []
    for request in requests(messages):
        turn = _Turn(copy.deepcopy(request), standing)
        planned.append((turn, turn.check(planner)))
        standing += planned[-1][1]
    for turn, new in reversed(planned):
        if turn.plan(planner, turn.standing) != new:
            raise turn.fail("deterministic", "the plan depends on what was planned before")
    return len(standing)


class _Turn:
    """One request, and the edits that stood before it."""

    def __init__(self, messages: list[Message], standing: Sequence[Edit]) -> None:
        self.messages = messages
        self.standing = list(standing)
        self.attention = [[0.0] * 16] * len(messages)

    def fail(self, rule: str, why: str) -> PolicyConformanceError:
        return PolicyConformanceError(rule, why, self.messages)

    def check(self, planner: PolicySet) -> list[Edit]:
        """Raises PolicyConformanceError, or returns the new edits."""
        before = copy.deepcopy(self.messages)
        new = self.plan(planner, self.standing)
        if self.messages != before:
            raise self.fail("pure", "planning changed the messages")
        for policy in planner.policies if len(planner.policies) == 1 else ():
            self.check_restated(policy, planner)
        self.check_result(new, any(getattr(policy, "removes_messages", False) for policy in planner.policies))
        self.check_settled(planner, new)
        return new

    def plan(self, policies: PolicySet, standing: Sequence[Edit]) -> list[Edit]:
        try:
            return policies.plan(self.messages, standing=standing, attention=self.attention)
        except PolicyRuleError as error:
            raise self.fail(error.rule, str(error)) from error

    def check_settled(self, planner: PolicySet, new: Sequence[Edit]) -> None:
        """Asked again, with its edits standing, a policy wants no more.

        Of several, an earlier one may want more once a later one has edited; but nothing twice, and not for ever.
        """
        standing = [*self.standing, *new]
        for _ in range(2 * len(planner.policies) - 1):
            more = self.plan(planner, standing)
            if not more:
                return
            if any(_touches(edit, one) for edit in more for one in standing):
                raise self.fail("no-repeat", "asked again, with its edits standing, it edits the same text")
            standing += more
        raise self.fail("no-repeat", "asked again, with its edits standing, it wants more")

    def check_restated(self, policy: Policy, planner: PolicySet) -> None:
        """An edit that is planned again, though it stands, must have the same bytes."""
        stands = {(*_place(edit), edit.end): edit.replacement for edit in self.standing}
        transcript = planner.transcript(self.messages, standing=self.standing, attention=self.attention)
        for edit in policy.plan(transcript):
            if stands.get((*_place(edit), edit.end), edit.replacement) != edit.replacement:
                raise self.fail("byte-stable", f"the replacement in message {edit.message} is another one each turn")

    def check_result(self, new: Sequence[Edit], removes: bool) -> None:
        edited = apply_edits(self.messages, [*self.standing, *new])
        gone = {edit.message for edit in (*self.standing, *new) if edit.part is Part.MESSAGE}
        kept = [index for index in range(len(self.messages)) if index not in gone]
        if gone and not removes:
            raise self.fail("message-count", f"messages {sorted(gone)} are gone")
        self.check_untouched(dict(zip(kept, edited, strict=True)))
        calls, results = _unpaired(self.messages, range(len(self.messages)))
        calls_left, results_left = _unpaired(edited, kept)
        if calls_left - calls or results_left - results:
            raise self.fail("pairing", f"left alone: calls {calls_left - calls}, results {results_left - results}")
        if all(edit.mode is Mode.AMORTIZE for edit in new):
            before = apply_edits(self.messages, self.standing)
            if new and _characters(edited) >= _characters(before):
                raise self.fail("shrinks", "the edits make the conversation longer")

    def check_untouched(self, edited: dict[int, Message]) -> None:
        task = max((n for n, message in enumerate(self.messages) if message.get("role") == "user"), default=None)
        last = _current_turn(self.messages)
        for index, message in enumerate(self.messages):
            if message.get("role") in SYSTEM and edited.get(index) != message:
                raise self.fail("system-prompt", f"message {index} was edited")
            if index >= last and edited.get(index) != message:
                raise self.fail("current-turn", f"message {index} was edited")
            after = edited.get(index)
            if index == task and (after is None or (_content(message).strip() and not _content(after).strip())):
                raise self.fail("current-task", f"message {index} is gone or empty")
            if (
                after is not None
                and message.get("role") in RESULT
                and _content(message).strip()
                and not _content(after)
            ):
                raise self.fail("empty-result", f"the tool result {index} is empty, which many providers refuse")


def _touches(edit: Edit, other: Edit) -> bool:
    """Whether two edits take out the same text, or one the message that the other is in."""
    if edit.message != other.message:
        return False
    if Part.MESSAGE in (edit.part, other.part):
        return True
    if (edit.part, edit.call) != (other.part, other.call):
        return False
    infinite = float("inf")
    ends = [infinite if one.end is None else one.end for one in (edit, other)]
    return (edit.start or 0) < ends[1] and (other.start or 0) < ends[0]


def _place(edit: Edit) -> tuple[int, Part, int, int]:
    return (edit.message, edit.part, edit.call, edit.start or 0)


def _current_turn(messages: Sequence[Message]) -> int:
    """Index at which the current turn begins (see `leyline_client.policy.Transcript`)."""
    index = len(messages) - 1
    while index >= 0 and messages[index].get("role") == "assistant":
        index -= 1  # a reply to be continued begins no turn of its own
    while index >= 0 and messages[index].get("role") != "assistant":
        index -= 1
    while index > 0 and messages[index - 1].get("role") == "assistant":
        index -= 1
    return max(index, 0)


def _content(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(block.get("text", "x")) for block in content)
    return content or ""


def _characters(messages: Sequence[Message]) -> int:
    fields = ("content", "reasoning_content", "tool_calls", "function_call")
    return sum(len(_content(one)) + sum(len(str(one.get(field) or "")) for field in fields[1:]) + 1 for one in messages)


def _unpaired(messages: Sequence[Message], indices: Sequence[int]) -> tuple[set[tuple[int, int]], set[int]]:
    """Calls without a result, and results without a call, by index in the unedited conversation."""
    waiting: dict[tuple[int, int], str | None] = {}
    answered: set[tuple[int, int]] = set()
    orphans: set[int] = set()
    newest: dict[str | None, tuple[int, int]] = {}
    for index, message in zip(indices, messages, strict=True):
        calls = message.get("tool_calls") or ([{"id": None}] if message.get("function_call") else [])
        if calls:
            for number, call in enumerate(calls):
                waiting[index, number] = newest_id = call.get("id")
                newest[newest_id] = (index, number)
        elif message.get("role") in RESULT:
            call = newest.get(message.get("tool_call_id"))
            if call is None:
                orphans.add(index)
            else:
                answered.add(call)
    return set(waiting) - answered, orphans
