"""Fidelity: the statistics against direct computation, the cases, their tokens, and a card of a real tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from leyline_client import LeylineClient, apply_edits
from leyline_client.testing import FakeServer
from leyline_evals import cli
from leyline_evals.common import EvalError
from leyline_evals.fidelity.card import Outcome, card, table
from leyline_evals.fidelity.cases import STUB, constructed, natural_set
from leyline_evals.fidelity.compare import Distribution, from_meta, kl, overlap
from leyline_evals.fidelity.prompts import build
from leyline_evals.fidelity.store import Store
from leyline_evals.gym import load_recording, recorded_tasks

if TYPE_CHECKING:
    from leyline_server_ext.embedded import EmbeddedServer

CARDS = Path(__file__).parents[2] / "evals" / "leyline_evals" / "cards"


def known(*probabilities: float, first: int = 0) -> Distribution:
    return Distribution({first + index: math.log(p) for index, p in enumerate(probabilities)})


def test_kl_of_whole_distributions_is_exact() -> None:
    p, q = (0.5, 0.3, 0.2), (0.2, 0.2, 0.6)
    exact = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert kl(known(*p), known(*q)) == pytest.approx(exact)
    assert kl(known(*p), known(*p)) == pytest.approx(0.0, abs=1e-12)


def test_kl_of_truncated_lists_is_a_lower_bound() -> None:
    p, q = (0.4, 0.3, 0.2, 0.06, 0.04), (0.1, 0.2, 0.3, 0.25, 0.15)
    exact = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    for count in (1, 2, 3, 4):
        found = kl(Distribution(dict(list(known(*p).logprobs.items())[:count])), known(*q))
        assert 0 < found <= exact + 1e-12
    assert kl(known(0.9), known(0.9, first=5)) == 0.0  # nothing in common: one class with all the mass


def test_overlap_and_the_first_token() -> None:
    one, other = known(0.5, 0.3, 0.2), known(0.1, 0.3, 0.6)
    assert (one.first, other.first) == (0, 2)
    assert overlap(one, other, 1) == 0.0
    assert overlap(one, other, 2) == 0.5
    assert overlap(one, other, 3) == 1.0
    assert Distribution({7: -1.0, 3: -1.0}).first == 3


def test_a_reply_without_log_probabilities_is_refused() -> None:
    assert from_meta({"output_top_logprobs": [[[-0.1, 5, None], [-2.5, 8, None]]]}).first == 5
    for meta in ({}, {"output_top_logprobs": []}, {"output_top_logprobs": [[]]}, {"output_top_logprobs": [None]}):
        with pytest.raises(EvalError, match="no log probabilities"):
            from_meta(meta)


@pytest.mark.parametrize(("distance", "edits"), [(50, 1), (400, 3)])
def test_a_constructed_case_changes_every_statement_of_the_fact(distance: int, edits: int) -> None:
    case = constructed(3, distance, edits)
    assert case == constructed(3, distance, edits) != constructed(4, distance, edits)
    edited = apply_edits(list(case.messages), case.edits)
    text = json.dumps(edited)
    new = case.edits[0].replacement
    assert text.count(f"The code word is {new}.") == edits
    old = case.messages[1]["content"].split("The code word is ")[1].split(".")[0]
    assert old != new
    assert f"The code word is {old}." not in text
    assert new in case.erratum
    assert old in case.erratum


def test_a_deleted_fact_is_gone_and_nothing_stands_in_its_place() -> None:
    case = constructed(3, 200, 2, deleted=True)
    edited = apply_edits(list(case.messages), case.edits)
    told = constructed(3, 200, 2).messages
    assert case.messages == told
    assert "The code word is " not in json.dumps(edited[:-1])
    assert all(edit.replacement == "" for edit in case.edits)
    assert case.kind == "deleted"


def test_measured_cases_are_found_again_and_a_cut_off_line_is_not(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cases.jsonl"
    a, b = known(0.9, 0.1), known(0.2, 0.8)
    case = constructed(1, 250, 1)
    outcome = Outcome(case.name, case.kind, 40, case.distance, 1, a, b, {"amortize": b})
    store = Store(path, {"model": "m"})
    assert store.find(case) is None
    store.add(outcome)
    with path.open("a") as file:
        file.write('{"name": "s2"')
    again = Store(path, {"model": "m"})
    assert len(again) == 1
    assert again.find(case) == outcome
    again.add(Outcome("s9", "deleted", 40, 250, 1, a, a, {}))
    assert len(Store(path, {"model": "m"})) == 2
    with pytest.raises(EvalError, match="another server"):
        Store(path, {"model": "other"})
    path.write_text("no JSON\n")
    with pytest.raises(EvalError, match="damaged"):
        Store(path, {"model": "m"})


def test_natural_cases_evict_outputs_the_assistant_went_on_from() -> None:
    cases = natural_set([load_recording(task) for task in recorded_tasks()], 6000, 18)
    assert len(cases) == 18
    assert len({case.name.split()[0] for case in cases}) == len(recorded_tasks())
    for case in cases:
        (edit,) = case.edits
        assert case.messages[edit.message]["role"] == "user"
        assert case.messages[edit.message + 1]["role"] == "assistant"
        assert edit.message < len(case.messages) - 2
        assert len(case.messages[edit.message]["content"]) >= 4 * len(STUB)
        assert case.messages[-1]["role"] == "assistant"


@pytest.mark.parametrize("edits", [1, 3])
def test_tokens_are_those_of_the_template_and_the_directives_give_the_edited_prompt(edits: int) -> None:
    case = constructed(1, 300, edits)
    with FakeServer() as server, LeylineClient("http://fake", transport=server.transport) as client:
        prompt = build(client, case)
        edited = client.render(apply_edits(list(case.messages), case.edits), add_generation_prompt=False).token_ids
        whole = client.render(list(case.messages), add_generation_prompt=False).token_ids
    assert edited is not None
    assert whole is not None
    assert len(prompt.directives) == edits
    target = prompt.edited + prompt.tail
    assert edited[: len(target)] == target
    assert whole[: len(prompt.source) + len(prompt.tail)] == prompt.source + prompt.tail
    assert all(len(directive.replacement) == 1 == directive.end - directive.start for directive in prompt.directives)
    assert len(prompt.repair_tail) > len(prompt.tail)
    assert 0 < prompt.distance < len(prompt.source)


def test_a_card_counts_per_kind_distance_and_arm() -> None:
    a, b = known(0.9, 0.1), known(0.2, 0.8)
    outcomes = [
        Outcome("1", "constructed", 40, 250, 1, a, b, {"amortize": a}),
        Outcome("2", "constructed", 60, 250, 1, a, b, {"amortize": b}),
        Outcome("3", "natural", 90, 500, 2, a, a, {"amortize": a}),
    ]
    found = card({"model": "m"}, outcomes, {"constructed": 7, "natural": 1})
    total = found["totals"]["constructed"]
    assert (total["cases"], total["tried"], total["references"]["disagree"]) == (2, 7, 2)
    assert total["arms"]["amortize"]["against_full"]["agreement"] == 0.5
    assert total["arms"]["amortize"]["against_reprefill"]["agreement"] == 0.5
    assert total["references"]["agreement"] == 0.0
    assert total["references"]["kl_mean"] == round(kl(a, b), 5)
    assert [(g["kind"], g["bucket_chars"], g["edits"], g["cases"]) for g in found["groups"]] == [
        ("constructed", 250, 1, 2),
        ("natural", 500, 2, 1),
    ]
    assert "constructed: 2 of 7 cases" in table(found)
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("name", ["tiny-mla", "tiny-gqa", "smollm2"])
def test_committed_cards_say_what_was_measured_on_what(name: str) -> None:
    found = json.loads((CARDS / f"{name}.json").read_text())
    assert found["kind"] == "leyline-fidelity"
    assert found["model"].startswith(name)
    assert found["machine"]["measured_at"]
    assert found["machine"]["server_versions"]["sglang"]
    for kind in ("constructed", "natural"):
        arms = found["totals"][kind]["arms"]
        # What must hold of any model: forget is a re-prefill, and says what it says.
        assert arms["forget"]["against_reprefill"]["agreement"] == 1.0
        assert arms["forget"]["against_reprefill"]["kl_mean"] < 1e-3
        assert set(arms) == {"amortize", "forget", "amortize+erratum", "full+erratum"}
    assert found["totals"]["constructed"]["references"]["agreement"] == 0.0


@pytest.mark.slow
def test_a_card_of_a_running_server(server_tiny_gqa: EmbeddedServer, tmp_path: Path) -> None:
    out = tmp_path / "fidelity.json"
    sizes: list[Any] = ["--distances", 60, "--edits", 1, 2, "--per-cell", 2, "--natural", 2, "--natural-chars", 2000]
    arguments = ["fidelity", "--base-url", server_tiny_gqa.base_url, "--out", str(out), *map(str, sizes)]
    assert cli.main(arguments) == 0
    found = json.loads(out.read_text())
    assert found["totals"]["constructed"]["cases"] == 4
    assert not out.with_suffix(".jsonl").exists()
    forget = found["totals"]["constructed"]["arms"]["forget"]["against_reprefill"]
    assert forget["agreement"] == 1.0
    assert forget["kl_mean"] < 1e-4
