"""Every policy that the registry knows, with the parameter sets it gives for small conversations."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from leyline_client.policy import Policy, available
from leyline_client.testing._corpus import conversation

CASES: list[tuple[str, dict[str, Any]]] = [
    (name, dict(parameters))
    for name, factory in available().items()
    for parameters in getattr(factory, "examples", ()) or ({},)
]
IDS = [f"{name}-{number}" for number, (name, _) in enumerate(CASES)]
FIRST: dict[str, dict[str, Any]] = dict(reversed(CASES))

conversations = st.randoms(use_true_random=False).map(conversation)


def few(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


def make(name: str, parameters: dict[str, Any]) -> Policy:
    return available()[name](**parameters)
