"""Every policy, and every composition of two, against every rule. A new policy joins by being in the registry."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
from cases import CASES, FIRST, IDS, conversations, few, make
from hypothesis import given

from leyline_client.testing._corpus import Message, corpus
from leyline_client.testing._policy import check_policy, replay

MORE = int(os.environ.get("LEYLINE_EXAMPLES", "1"))
"""Factor on the number of random conversations in the slow tests."""
PAIRS = list(itertools.product(FIRST, FIRST))


@pytest.mark.parametrize(("name", "parameters"), CASES, ids=IDS)
def test_keeps_every_rule(name: str, parameters: dict[str, Any]) -> None:
    edits = check_policy(make(name, parameters), transcripts=corpus(40))
    assert edits > 0, "never acted: give the policy `examples` with which it acts on small conversations"


@pytest.mark.parametrize("name", FIRST)
def test_keeps_every_rule_with_its_defaults(name: str) -> None:
    assert check_policy(make(name, {}), transcripts=corpus(10)) >= 0


@pytest.mark.parametrize(("name", "parameters"), CASES, ids=IDS)
def test_keeps_every_rule_on_random_conversations(name: str, parameters: dict[str, Any]) -> None:
    policy = make(name, parameters)

    @few(8)
    @given(conversations)
    def check(messages: list[Message]) -> None:
        replay([policy], messages)

    check()


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=map("+".join, PAIRS))
def test_keeps_every_rule_composed(one: str, other: str) -> None:
    policies = [make(one, FIRST[one]), make(other, FIRST[other])]
    start = PAIRS.index((one, other))
    for messages in corpus(200)[start : start + 2]:
        replay(policies, messages)


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), PAIRS, ids=map("+".join, PAIRS))
def test_keeps_every_rule_composed_on_random_conversations(one: str, other: str) -> None:
    policies = [make(one, FIRST[one]), make(other, FIRST[other])]

    @few(10 * MORE)
    @given(conversations)
    def check(messages: list[Message]) -> None:
        replay(policies, messages)

    check()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parameters"), CASES, ids=IDS)
def test_keeps_every_rule_on_many_random_conversations(name: str, parameters: dict[str, Any]) -> None:
    policy = make(name, parameters)

    @few(100 * MORE)
    @given(conversations)
    def check(messages: list[Message]) -> None:
        replay([policy], messages)

    check()
