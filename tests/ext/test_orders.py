from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_server_ext.lineage import Lineage
from leyline_server_ext.orders import LINEAGE_PREFIX, Candidate, Drop, Forged, Order, Piece, Sealer, Source

SEALER = Sealer(b"key")
numbers = st.integers(0, 2**20)
lineages = st.builds(Lineage, st.lists(st.tuples(numbers, st.integers(1, 2**64 - 1)), max_size=4).map(tuple), numbers)
sources = st.builds(
    Source, st.lists(st.integers(0, 2**24 - 1), max_size=30).map(lambda ids: np.array(ids, dtype=np.int64)), lineages
)
candidates = st.builds(Candidate, numbers, numbers, numbers)
drops = st.lists(st.builds(Drop, numbers, numbers), max_size=3).map(tuple)
orders = st.builds(
    Order,
    st.lists(sources, max_size=3).map(tuple),
    st.lists(
        st.builds(Piece, numbers, numbers, st.lists(candidates, max_size=3).map(tuple), st.booleans()), max_size=3
    ).map(tuple),
    drops,
    drops,
    st.booleans(),
)
names = st.none() | st.text(min_size=1, max_size=8)


def parts(order: Order) -> tuple[object, ...]:
    """Comparable (arrays are not)."""
    return tuple((s.ids.tolist(), s.lineage) for s in order.sources), order.pieces, order.forget, order.release


@given(orders, names)
def test_an_order_comes_back(order: Order, namespace: str | None):
    opened = SEALER.open_order(SEALER.seal_order(order, namespace), namespace)
    assert parts(opened) == parts(order)
    assert opened.exclusive == order.exclusive


@given(lineages.filter(bool), names, st.none() | st.text(min_size=1, max_size=20))
def test_a_lineage_comes_back_with_the_clients_own_key(lineage: Lineage, namespace: str | None, extra: str | None):
    sealed = SEALER.seal_lineage(lineage, namespace, extra)
    assert sealed is not None
    assert sealed.startswith(LINEAGE_PREFIX)
    assert SEALER.open_lineage(sealed, namespace) == (lineage, extra)
    # The engine appends the LoRA id to whatever the extra key is.
    assert SEALER.open_lineage(sealed + "lora-7", namespace) == (lineage, (extra or "") + "lora-7")


def test_a_clean_lineage_leaves_the_clients_key_alone():
    assert SEALER.seal_lineage(Lineage(), "a", None) is None
    assert SEALER.seal_lineage(Lineage(), "a", "mine") == "mine"


@given(orders, lineages.filter(bool), names, names)
def test_what_was_made_for_one_namespace_is_forged_in_another(
    order: Order, lineage: Lineage, mine: str | None, other: str | None
):
    if mine == other:
        return
    with pytest.raises(Forged):
        SEALER.open_order(SEALER.seal_order(order, mine), other)
    with pytest.raises(Forged):
        SEALER.open_lineage(SEALER.seal_lineage(lineage, mine, None) or "", other)


def test_another_servers_seal_is_forged():
    with pytest.raises(Forged):
        Sealer(b"other").open_order(SEALER.seal_order(Order(), None), None)


def test_a_lineage_is_no_order():
    lineage = (SEALER.seal_lineage(Lineage(((1, 2),)), None, None) or "").removeprefix(LINEAGE_PREFIX).rstrip("|")
    with pytest.raises(Forged):
        SEALER.open_order(lineage, None)


def test_a_namespace_cannot_run_into_the_payload():
    """What is sealed for a namespace with a separator in it must not open for a part of that namespace."""
    sealed = SEALER.seal_order(Order(), "a\0b")
    with pytest.raises(Forged):
        SEALER.open_order(f"b\0{sealed}", "a")


odd = st.characters(codec=None).map(lambda character: character * 3)
base64s = st.binary().map(lambda raw: base64.b64encode(raw).decode())


@given(st.text() | odd | base64s)
def test_rubbish_is_forged(text: str):
    prefixed = f"{LINEAGE_PREFIX}{text}"
    for sealed in (text, f"{text}.{'0' * 32}", prefixed, f"{prefixed}.|", f"{text}.\u00e9"):
        with pytest.raises(Forged):
            SEALER.open_order(sealed, None)
        with pytest.raises(Forged):
            SEALER.open_lineage(sealed, None)
        with pytest.raises(Forged):
            SEALER.open_lineage(sealed, "\udc80")


@given(orders, st.data())
def test_a_damaged_order_is_forged(order: Order, data: st.DataObject):
    sealed = SEALER.seal_order(order, "salt")
    at = data.draw(st.integers(0, len(sealed) - 1))
    instead = data.draw(st.characters(codec=None).filter(lambda c: c != sealed[at]) | st.just(""))
    with pytest.raises(Forged):
        SEALER.open_order(sealed[:at] + instead + sealed[at + 1 :], "salt")
