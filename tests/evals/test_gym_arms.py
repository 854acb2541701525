"""Arm names and what they stand for."""

from __future__ import annotations

import pytest

from leyline_evals.gym.arms import DEFAULT_ARMS, Arm, UnknownArmError, parse_arm


def test_the_four_arms_of_the_experiment() -> None:
    assert [parse_arm(name) for name in DEFAULT_ARMS] == [
        Arm("keep-all", (), "amortize"),
        Arm("truncate+forget", ("truncate-older-than-n",), "forget"),
        Arm("truncate+amortize", ("truncate-older-than-n",), "amortize"),
        Arm("stale+amortize", ("stale-tool-detector",), "amortize"),
    ]


def test_any_policy_with_parameters_and_several() -> None:
    name = "stale&truncate-older-than-n:n=3,head=1+forget"
    assert parse_arm(name) == Arm(name, ("stale-tool-detector", "truncate-older-than-n:n=3,head=1"), "forget")


@pytest.mark.parametrize(
    "name", ["", "keep", "truncate", "+forget", "truncate+", "truncate+both", "../x+forget", "a&+forget"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UnknownArmError, match="expected keep-all or"):
        parse_arm(name)
