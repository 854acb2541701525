"""The shipped scripted policy passes through a policy set, which asks twice."""

from __future__ import annotations

from leyline_client.policy import Edit, resolve
from leyline_client.testing import ScriptedPolicy

MESSAGES = [
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "second answer"},
    {"role": "user", "content": "end"},
]


def test_one_step_is_used_per_turn() -> None:
    edit = Edit(message=1, replacement="cut", start=0, end=12)
    with ScriptedPolicy([[edit], [], [edit]]) as policy:
        policies = resolve([policy])
        assert policies.plan(MESSAGES) == [edit]
        assert policies.plan(MESSAGES, standing=[edit]) == []
        assert policies.plan(MESSAGES, standing=[edit]) == []
