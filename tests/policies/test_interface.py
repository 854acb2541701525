"""`resolve` and `PolicySet.plan`, the two things the session and the simulator call."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from leyline_client._edits import apply_edits
from leyline_client._errors import PolicyError, PolicyRegistrationError, PolicyRuleError
from leyline_client.policy import Edit, Mode, Part, PolicyBase, Transcript, _registry, available, resolve


def loop(steps: int, size: int = 1_000) -> list[dict[str, Any]]:
    """A system prompt, a task, and ``steps`` reads of different files."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Fix it."},
    ]
    for step in range(steps):
        call = {"id": f"call_{step}", "type": "function"}
        call["function"] = {"name": "read_file", "arguments": json.dumps({"path": f"file_{step}.py"})}  # type: ignore[assignment]
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        text = "".join(f"line {line} of file {step}\n" for line in range(size))[:size]
        messages.append({"role": "tool", "tool_call_id": f"call_{step}", "content": text})
    return messages


class Fixed(PolicyBase):
    """Plans what it was given."""

    name = "fixed"
    edits: tuple[Edit, ...] = ()

    def plan(self, transcript: Transcript) -> Sequence[Edit]:
        return self.edits


class Remover(Fixed):
    name = "remover"
    removes_messages = True


def test_truncate_keeps_the_newest_turns_whole() -> None:
    messages = loop(5)
    edits = resolve(["truncate-older-than-n"]).plan(messages)
    assert [edit.message for edit in edits] == [3, 5, 7]
    edited = apply_edits(messages, edits)
    for index in (3, 5, 7):
        text = edited[index]["content"]
        assert text.startswith(messages[index]["content"][:60])
        assert text.endswith(messages[index]["content"][-60:])
        assert len(text) <= 200 + len("\n[... truncated ...]\n")
    assert edited[9] == messages[9]


def test_nothing_is_issued_twice() -> None:
    policies = resolve(["truncate-older-than-n:n=1,max_chars=50"])
    standing: list[Edit] = []
    for end in range(4, 25, 2):
        messages = loop(12)[:end]
        new = policies.plan(messages, standing=standing)
        standing += new
        assert policies.plan(messages, standing=standing) == []
        apply_edits(messages, standing)
    assert len(standing) == len({edit.message for edit in standing}) == 10


@pytest.mark.parametrize(
    ("spec", "culprit", "says"),
    [
        ("no-such-policy", "no-such-policy", "unknown"),
        ("truncate-older-than-n:n=0", "truncate-older-than-n", "'n'"),
        ("truncate-older-than-n:m=1", "truncate-older-than-n", "'m'"),
        ("truncate-older-than-n:n=true", "truncate-older-than-n", "'n'"),
        ("truncate-older-than-n:n", "truncate-older-than-n", "parameter=value"),
        (("truncate-older-than-n", {"n": -1}), "truncate-older-than-n", "'n'"),
        (Fixed, "fixed", "instance"),
        (object(), "object", "name"),
    ],
)
def test_a_bad_policy_is_refused_by_name(spec: Any, culprit: str, says: str) -> None:
    with pytest.raises(PolicyRegistrationError, match=says) as caught:
        resolve([spec])
    assert caught.value.policy == culprit


@pytest.mark.parametrize(
    ("edits", "rule"),
    [
        ([Edit(message=0, replacement="x")], "system-prompt"),
        ([Edit(message=9, replacement="x")], "current-turn"),
        ([Edit(message=1, replacement="x")], "current-task"),
        ([Edit(message=99, replacement="x")], "in-range"),
        ([Edit(message=3, end=5_000)], "in-range"),
        ([Edit(message=2, part=Part.REASONING)], "in-range"),
        ([Edit(message=3, end=5), Edit(message=3, start=4, end=9)], "no-repeat"),
        ([Edit(message=3, part=Part.MESSAGE)], "message-count"),
        ([Edit(message=2, part=Part.ARGUMENTS, replacement="gone")], "valid-arguments"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused_with_its_name(edits: list[Edit], rule: str) -> None:
    with pytest.raises(PolicyRuleError) as caught:
        resolve([Fixed(edits=tuple(edits))]).plan(loop(4))
    assert (caught.value.rule, caught.value.policy) == (rule, "fixed")


@pytest.mark.parametrize("index", [2, 3])
def test_half_a_tool_call_cannot_be_removed(index: int) -> None:
    with pytest.raises(PolicyRuleError) as caught:
        resolve([Remover(edits=(Edit(message=index, part=Part.MESSAGE),))]).plan(loop(4))
    assert caught.value.rule == "pairing"


def test_a_policy_that_raises_is_named() -> None:
    class Broken(PolicyBase):
        name = "broken"

        def plan(self, transcript: Transcript) -> Sequence[Edit]:
            raise ZeroDivisionError("oops")

    with pytest.raises(PolicyError, match="oops") as caught:
        resolve([Broken()]).plan(loop(2))
    assert caught.value.policy == "broken"


def test_an_edit_that_wants_more_than_stands_gets_the_rest() -> None:
    messages = loop(4)
    standing = [Edit(message=3, start=100, end=900, replacement="[cut]")]
    new = resolve([Fixed(edits=(Edit(message=3, replacement="[gone]", mode=Mode.FORGET),))]).plan(
        messages, standing=standing
    )
    assert [(edit.start, edit.end, edit.replacement) for edit in new] == [(0, 100, ""), (900, 1_000, "")]
    assert apply_edits(messages, [*standing, *new])[3]["content"] == "[cut]"


class Points(dict[str, str]):
    """Entry points of some installed packages."""

    def __call__(self, group: str) -> list[EntryPoint]:
        assert group == "leyline.policies"
        return [EntryPoint(name, value, group) for name, value in self.items()]


def test_installed_packages_add_policies_and_bad_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    points = Points(
        {
            "redact": "somebody.else:Redact",
            "broken": "no_such_module:Policy",
            "misnamed": "leyline_policies.redact:Redact",
            "truncate-older-than-n": "leyline_policies.truncate_older_than_n:TruncateOlderThanN",
        }
    )
    monkeypatch.setattr(_registry, "entry_points", points)
    for name, says in {"redact": "offered twice", "broken": "no_such_module", "misnamed": "'redact'"}.items():
        with pytest.raises(PolicyRegistrationError, match=says) as caught:
            resolve([name])
        assert caught.value.policy == name
    assert resolve(["truncate-older-than-n", "clear-thinking"])


def test_entry_points_and_the_bundled_table_agree() -> None:
    from leyline_policies import BUNDLED

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["leyline.policies"] == BUNDLED
    assert set(available()) >= set(BUNDLED)
