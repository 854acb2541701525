from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_client._models import Directive, apply_directives
from leyline_client.akv import drop, repos


def test_drop_is_a_deletion_and_repos_says_what_moves() -> None:
    batch = [drop(10, 20), drop(50, 55)]
    assert [(one.start, one.end, one.delta) for one in batch] == [(10, 20, -10), (50, 55, -5)]
    assert [(s.start, s.end, s.delta) for s in repos(batch, 100)] == [(10, 40, -10), (40, 85, -15)]


def test_repos_refuses_what_a_server_would_refuse() -> None:
    with pytest.raises(ValueError, match=r"directives\[1\]"):
        repos([drop(10, 20), drop(15, 30)], 100)
    with pytest.raises(ValueError, match="beyond"):
        repos([drop(10, 200)], 100)


@given(st.lists(st.integers(0, 60), min_size=2, max_size=8, unique=True), st.integers(61, 80))
def test_every_moved_token_is_where_repos_says(cuts: list[int], length: int) -> None:
    cuts.sort()
    batch = [
        Directive(start=a, end=b, replacement=tuple([999] * (a % 3)))
        for a, b in zip(cuts[::2], cuts[1::2], strict=False)
    ]
    source = list(range(length))
    target = apply_directives(source, batch)
    for segment in repos(batch, length):
        moved = target[segment.start : segment.end]
        assert moved == source[segment.start - segment.delta : segment.end - segment.delta]
