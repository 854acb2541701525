"""Policies: what decides which parts of a conversation are no longer worth attending to.

::

    policies = resolve(["stale-tool-detector", "truncate-older-than-n:n=3"])
    new = policies.plan(messages, standing=standing)     # list[Edit]
    standing += new
"""

from leyline_client._models import Edit, Mode, Part

from ._base import Policy, PolicyBase
from ._facts import CallFacts
from ._registry import GROUP, PolicySpec, available, resolve
from ._rules import RULES
from ._set import PolicySet, plan_in_order
from ._tokens import TokenCounter, counts_from_render
from ._transcript import Transcript
from ._view import MessageView

__all__ = [
    "GROUP",
    "RULES",
    "CallFacts",
    "Edit",
    "MessageView",
    "Mode",
    "Part",
    "Policy",
    "PolicyBase",
    "PolicySet",
    "PolicySpec",
    "TokenCounter",
    "Transcript",
    "available",
    "counts_from_render",
    "plan_in_order",
    "resolve",
]
