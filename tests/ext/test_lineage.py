from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_server_ext.lineage import (
    CLEAN,
    TOKEN_BITS,
    KeyTranslator,
    Lineage,
    canonical,
    key_elements,
    lineage_tags,
    sign,
    tags,
)

ids = st.lists(st.integers(0, (1 << TOKEN_BITS) - 1), min_size=1, max_size=80)
signatures = st.integers(1, (1 << 64) - 1)
entries = st.lists(st.tuples(st.integers(0, 90), signatures), max_size=5).map(
    lambda found: canonical(sorted(dict(found).items()))
)


def keyed(tokens: list[int], lineage: Lineage) -> list[int]:
    return key_elements(np.array(tokens, dtype=np.int64), lineage).tolist()


@given(ids, entries)
def test_only_positions_from_the_first_operation_on_are_tagged(tokens: list[int], found: tuple[tuple[int, int], ...]):
    lineage = Lineage(found)
    key = keyed(tokens, lineage)
    first = len(tokens) if lineage.first is None else lineage.first
    assert key[:first] == tokens[:first]
    # A clean key never equals a tagged one: no token id has a bit up there, and every tag has one.
    assert all(element >> TOKEN_BITS for element in key[first:])
    assert [element & ((1 << TOKEN_BITS) - 1) for element in key] == tokens
    assert all(0 <= element < 1 << 63 for element in key)


@given(ids, entries)
def test_a_translator_makes_the_same_key(tokens: list[int], found: tuple[tuple[int, int], ...]):
    translator = KeyTranslator(Lineage(found))
    for length in (len(tokens), max(1, len(tokens) // 2), len(tokens)):
        raw = array("q", tokens[:length])
        assert translator.tagged(raw).tolist() == keyed(tokens, Lineage(found))[:length]
        assert raw.tolist() == tokens[:length], "the request's own tokens were changed"


def test_an_untagged_key_is_not_copied():
    raw = array("q", range(10))
    assert KeyTranslator(Lineage()).tagged(raw) is raw
    assert KeyTranslator(Lineage(((10, 5),))).tagged(raw) is raw


@given(signatures, signatures, st.integers(0, 1000), st.integers(0, 1000))
def test_tags_depend_on_signature_and_position(a: int, b: int, start: int, other: int):
    left, right = tags(a, start, start + 4).tolist(), tags(b, other, other + 4).tolist()
    assert (left == right) == ((a, start) == (b, other))


@given(entries, st.integers(1, 100))
def test_tags_of_a_lineage_are_those_of_its_signatures(found: tuple[tuple[int, int], ...], length: int):
    lineage = Lineage(found)
    first = length if lineage.first is None else min(lineage.first, length)
    want = [int(tags(lineage.signature_at(p), p, p + 1)[0]) for p in range(first, length)]
    assert lineage_tags(lineage, length).tolist() == want


def test_a_signature_covers_all_it_is_made_of():
    made = {
        sign(1, 2, b"a", b"b"),
        sign(2, 2, b"a", b"b"),
        sign(1, 3, b"a", b"b"),
        sign(1, 2, b"ab", b""),
        sign(1, 2, b"", b"ab"),
        sign(1, 2, b"b", b"a"),
        sign(1, 2, b"ab"),
    }
    assert len(made) == 7
    assert CLEAN not in made
    assert sign(1, 2, b"a") == sign(1, 2, b"a")


@given(entries, st.integers(0, 100))
def test_the_signature_in_force(found: tuple[tuple[int, int], ...], position: int):
    assert Lineage(found).signature_at(position) == ([CLEAN] + [s for p, s in found if p <= position])[-1]


def test_prefilled_from_keeps_a_lineage_whose_splice_is_all_there():
    lineage = Lineage(((10, 7), (20, 8)), 30)
    assert lineage.prefilled_from(30) is lineage
    assert lineage.prefilled_from(50) is lineage


def test_prefilled_from_signs_what_is_prefilled_instead():
    lineage = Lineage(((10, 7), (20, 8)), 30)
    actual = lineage.prefilled_from(25)
    assert actual.entries[:2] == lineage.entries
    assert actual.entries[2][0] == 25
    assert actual.entries[2][1] not in (CLEAN, 7, 8)
    assert actual.spliced_until == 25
    assert lineage.prefilled_from(25) == actual, "two such requests share"
    assert lineage.prefilled_from(26).entries[2] != actual.entries[2]


@pytest.mark.parametrize("position", [0, 5, 10])
def test_prefilled_from_is_clean_where_nothing_spliced_precedes(position: int):
    assert Lineage(((10, 7),), 30).prefilled_from(position) == Lineage()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=8))
def test_canonical_entries_mean_the_same(found: list[tuple[int, int]]):
    found.sort(key=lambda entry: entry[0])
    result = canonical(found)
    assert [p for p, _ in result] == sorted({p for p, _ in result})
    for position in range(11):
        before = [s for p, s in found if p <= position]
        assert Lineage(result).signature_at(position) == (before[-1] if before else CLEAN)
    assert all(a[1] != b[1] for a, b in zip(((0, CLEAN), *result), result, strict=False))
