"""Test doubles for agent loops and policies: a server without a model, a policy without judgement, a check of policies.

::

    def test_my_loop():
        with FakeServer(["hello"]) as server:
            session = LeylineSession("http://fake", transport=server.transport)
            assert run_my_loop(session) == "hello"
            assert server.turns[0].receipt.cached_tokens == 0
"""

from __future__ import annotations

from ._fake import FakeServer, Turn
from ._faults import Fault
from ._policies import ScriptedPolicy
from ._policy import PolicyConformanceError, check_policy
from ._replies import ScriptExhausted, UnconsumedSteps, tool_call

__all__ = [
    "FakeServer",
    "Fault",
    "PolicyConformanceError",
    "ScriptExhausted",
    "ScriptedPolicy",
    "Turn",
    "UnconsumedSteps",
    "check_policy",
    "tool_call",
]
