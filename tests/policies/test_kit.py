"""The conformance kit catches what it says it catches, and the example passes it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field
from tool_loops import START, reading

from leyline_client.policy import Edit, Part, Policy, PolicyBase, Transcript
from leyline_client.policy import _set as policy_set
from leyline_client.testing import PolicyConformanceError, check_policy
from leyline_client.testing import _policy as kit
from leyline_client.testing._corpus import corpus, requests

CONVERSATION = [*START, *(one for messages in reading(6, 400) for one in messages)]


def policy(plan: Callable[[Any, Transcript], Any], removes: bool = False) -> Policy:
    class Made(PolicyBase):
        name = "made"
        removes_messages = removes
        state: list[int] = Field(default_factory=list)

    Made.plan = plan  # type: ignore[method-assign]
    Made.__abstractmethods__ = frozenset()
    return Made()


def results(transcript: Transcript, stub: str = "[x]") -> list[Edit]:
    return [Edit(message=view.index, replacement=stub) for view in transcript.results()]


def remembers(self: Any, transcript: Transcript) -> list[Edit]:
    self.state.append(len(transcript))
    return results(transcript) if len(set(self.state)) < 5 else []


SEEN: set[int] = set()


def remembers_for_all(self: Any, transcript: Transcript) -> list[Edit]:
    SEEN.add(len(transcript))
    return results(transcript) if len(SEEN) < 5 else []


def counts(self: Any, transcript: Transcript) -> list[Edit]:
    return results(transcript, f"[{len(transcript)}]")


MUTANTS: dict[str, tuple[Callable[[Any, Transcript], Any], bool]] = {
    "system-prompt": (lambda self, t: [Edit(message=0, replacement="x")], False),
    "current-turn": (lambda self, t: [Edit(message=len(t) - 1, end=1)], False),
    "current-task": (lambda self, t: [Edit(message=1)] if t.turn else [], False),
    "message-count": (lambda self, t: [v.remove() for g in t.groups if not g[0].protected for v in g][1:], False),
    "pairing": (lambda self, t: [v.remove() for v in t.results()], True),
    "empty-result": (lambda self, t: results(t, ""), False),
    "shrinks": (lambda self, t: results(t, "long " * 200), False),
    "byte-stable": (counts, False),
    "deterministic": (remembers, False),
    "in-range": (lambda self, t: [Edit(message=10_000)], False),
    "edits": (lambda self, t: "text", False),
    "valid-arguments": (lambda self, t: [Edit(message=2, part=Part.ARGUMENTS)] if t.turn > 1 else [], False),
}


@pytest.mark.parametrize("rule", MUTANTS)
def test_a_policy_that_breaks_a_rule_is_caught(rule: str) -> None:
    plan, removes = MUTANTS[rule]
    with pytest.raises(PolicyConformanceError) as caught:
        check_policy(policy(plan, removes), transcripts=[CONVERSATION])
    assert caught.value.rule == rule


def test_state_outside_the_policy_is_caught_too() -> None:
    SEEN.clear()
    with pytest.raises(PolicyConformanceError) as caught:
        check_policy(policy(remembers_for_all), transcripts=[CONVERSATION])
    assert caught.value.rule == "deterministic"


@pytest.mark.parametrize("rule", ["system-prompt", "current-turn", "current-task", "message-count", "pairing"])
def test_the_kit_does_not_lean_on_the_checks_of_the_set(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_set, "check_plan", lambda *arguments: None)
    monkeypatch.setattr(policy_set, "check_result", lambda *arguments: None)
    plan, removes = MUTANTS[rule]
    with pytest.raises(PolicyConformanceError) as caught:
        check_policy(policy(plan, removes), transcripts=[CONVERSATION])
    assert caught.value.rule == rule


def test_a_policy_that_is_fine_passes_and_says_how_often_it_acted() -> None:
    assert check_policy(policy(lambda self, t: results(t)), transcripts=[CONVERSATION]) == 5
    assert check_policy(policy(lambda self, t: []), transcripts=[CONVERSATION]) == 0


def test_hypothesis_finds_what_the_corpus_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "corpus", list)
    with pytest.raises(PolicyConformanceError):
        check_policy(policy(lambda self, t: results(t)[:3] if len(t.messages) > 12 else counts(self, t)))


def test_without_hypothesis_the_corpus_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(PolicyConformanceError):
        check_policy(policy(counts))


def test_the_corpus_holds_every_shape() -> None:
    messages = [one for conversation in corpus() for one in conversation]
    assert corpus() == corpus()
    assert {one["role"] for one in messages} == {"system", "developer", "user", "assistant", "tool", "function"}
    assert any(isinstance(one.get("content"), list) for one in messages)
    assert any(len(one.get("tool_calls") or ()) > 1 for one in messages)
    assert any("reasoning_content" in one for one in messages)
    assert any(one["role"] in ("system", "developer") for conversation in corpus() for one in conversation[2:])
    assert all(turns[-1] == conversation for conversation in corpus(5) for turns in [requests(conversation)])


def test_the_example_keeps_every_rule() -> None:
    path = Path(__file__).parents[2] / "examples" / "custom_policy.py"
    spec = importlib.util.spec_from_file_location("custom_policy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert check_policy(module.QuietTools(turns=1), transcripts=corpus(30)) > 0
