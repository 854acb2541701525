from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_client import ConfigurationError, Edit, Part
from leyline_client._history import JsonWriter, Relation, Standing, carry, common_prefix, relate

FRAGMENTS = st.lists(st.sampled_from("abcdef"), max_size=12)


@given(a=FRAGMENTS, b=FRAGMENTS)
def test_the_common_prefix_is_that_of_a_plain_loop(a: list[str], b: list[str]) -> None:
    plain = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))
    assert common_prefix(a, b) == plain


@pytest.mark.parametrize(
    ("old", "previous", "new", "relation"),
    [
        ("sua", 0, "suat", Relation.EXTENSION),
        ("sua", 0, "sua", Relation.EXTENSION),
        ("suatbq", 4, "suatX", Relation.RETRY),
        ("suatbq", 4, "suat", Relation.RETRY),
        ("suatbq", 4, "suatXq", Relation.RETRY),
        ("suatbq", 4, "suaXbqcr", Relation.EDITED),
        ("suatbqcr", 6, "subqcrds", Relation.EDITED),
        ("suatbqcrds", 8, "sucrdset", Relation.EDITED),
        ("suatbqcr", 6, "suatXY", Relation.FORK),
        ("su", 0, "sv", Relation.FORK),
        ("su", 0, "tu", Relation.FORK),
        ("suatbq", 4, "sv", Relation.FORK),
        ("suatbq", 4, "su", Relation.FORK),
        ("suatbq", 4, "xyz", Relation.FORK),
    ],
)
def test_how_a_history_continues_another(old: str, previous: int, new: str, relation: Relation) -> None:
    assert relate(list(old), previous, list(new))[0] is relation


@given(old=st.lists(st.integers(), unique=True, min_size=1, max_size=12), data=st.data())
def test_carried_edits_stay_on_their_message(old: list[int], data: st.DataObject) -> None:
    """Unique messages, some changed, some dropped, some inserted: an edit goes with its message, or it goes."""
    before = [f"m{number}" for number in old]
    after: list[str] = []
    for fragment in before:
        what = data.draw(st.sampled_from(["keep", "keep", "change", "drop", "insert"]))
        after += {"keep": [fragment], "change": [fragment + "!"], "drop": [], "insert": ["new", fragment]}[what]
    standing = [Standing(Edit(message=index), 1) for index in range(len(before))]
    prefix = common_prefix(before, after)
    carried = carry(standing, before, after, prefix)
    kept = [fragment for fragment in before if fragment in after]
    assert [after[one.edit.message] for one in carried] == kept


def test_removals_hold_together_or_not_at_all() -> None:
    standing = [
        Standing(Edit(message=2, part=Part.MESSAGE), 1),
        Standing(Edit(message=3, part=Part.MESSAGE), 1),
        Standing(Edit(message=1), 1),
    ]
    carried = carry(standing, list("suatz"), list("suaXz"), 3)
    assert [one.edit.part for one in carried] == [Part.CONTENT]


@pytest.mark.parametrize("message", [{"content": {1, 2}}, {"content": ("a", "b")}])
def test_iterables_are_written_as_lists(message: dict[str, Any]) -> None:
    history = JsonWriter().read([{"role": "user", **message}])
    assert "[" in history.fragments[0]


@pytest.mark.parametrize(
    "message", [b"x", {"role": object()}, {"role": b"x"}, float("nan"), {"role": "user", "x": dict}]
)
def test_what_has_no_json_form_names_its_place(message: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"messages\[1\]"):
        JsonWriter().read([{"role": "user"}, message])
