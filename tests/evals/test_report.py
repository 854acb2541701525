"""The report: what is collected, what a strip shows, and the page in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from leyline_client.testing import FakeServer
from leyline_evals import cli
from leyline_evals.common import EvalError
from leyline_evals.gym.results import RunFile, RunKey
from leyline_evals.report.collect import collect
from leyline_evals.report.strips import blocks
from tests.evals.browser import Browser, installed

ARMS = ("keep-all", "truncate+forget", "truncate+amortize")


def receipt(**fields: Any) -> dict[str, Any]:
    return {"prompt_tokens": 0, "cached_tokens": 0, "segments": [], "directives": [], **fields}


def change(start: int, end: int, replacement: int = 0) -> dict[str, int]:
    return {"start": start, "end": end, "replacement_tokens": replacement}


def test_an_append_is_kept_then_fresh() -> None:
    assert blocks(receipt(prompt_tokens=10, cached_tokens=7)) == [("kept", 7), ("fresh", 3)]
    assert blocks(receipt(prompt_tokens=4)) == [("fresh", 4)]
    assert blocks(receipt()) == []


def test_a_splice_shows_what_left_where_it_was() -> None:
    # 100 tokens, [40, 60) became 5 tokens, 10 more follow.
    segment = {"start": 45, "end": 85, "delta": -15}
    found = blocks(receipt(prompt_tokens=95, cached_tokens=80, segments=[segment], directives=[change(40, 60, 5)]))
    assert found == [("kept", 40), ("evicted", 20), ("fresh", 5), ("rotated", 40), ("fresh", 10)]


def test_two_edits_and_a_cached_replacement() -> None:
    segments = [{"start": 12, "end": 22, "delta": -8}, {"start": 22, "end": 30, "delta": -13}]
    directives = [change(10, 20, 2), change(30, 35)]
    # 10 untouched + 2 of a replacement that was cached + 18 rotated.
    found = blocks(receipt(prompt_tokens=34, cached_tokens=30, segments=segments, directives=directives))
    assert found == [("kept", 10), ("evicted", 10), ("kept", 2), ("rotated", 10), ("evicted", 5), ("rotated", 8),
                     ("fresh", 4)]  # fmt: skip


def test_a_forget_is_fresh_from_its_first_position() -> None:
    found = blocks(receipt(prompt_tokens=90, cached_tokens=40, directives=[change(40, 60, 6)]))
    assert found == [("kept", 40), ("evicted", 20), ("fresh", 50)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as ``out`` is after everything has been run."""
    out = tmp_path_factory.mktemp("out")
    with FakeServer().serve() as url:
        arguments = ["replay", "--base-url", url, "--tasks", "purr", "config", "--arms", *ARMS, "--max-turns", "7"]
        assert cli.main([*arguments, "--out", str(out / "evals.json")]) == 0
    for arm, solved in (("keep-all", [True, False, False]), ("truncate+amortize", [True, True, False])):
        for seed, resolved in enumerate(solved):
            with RunFile(out / "debug-gym", RunKey(arm, "purr", seed), {}) as file:
                file.step({"turn": 0, "prompt_tokens": 50, "cached_tokens": 10, "ttft_ms": 12.0, "leyline": None})
                end = {"resolved": resolved, "score": 1, "max_score": 2, "turns": 1, "ended": "x", "seconds": 2.0}
                file.finish("done", end)
    (out / "drift.json").write_text(json.dumps({"step": 7, "drift": DRIFT, "first_token": []}))
    (out / "fidelity.json").write_text(json.dumps(CARD))
    (out / "mechanism.json").write_text(json.dumps(MECHANISM))
    return out


DRIFT = [
    {"storage": "bf16", "math": "fp32", "rotations": n, "chained": chained, "relative_l2": 0.002 * n**0.5}
    for n in (1, 10, 100)
    for chained in (True, False)
]
_SIDE = {"agreement": 0.5, "agreement_low": 0.2, "agreement_high": 0.8, "overlap": 0.7, "kl_mean": 0.1}
_TOTAL = {
    "cases": 4,
    "tried": 9,
    "distance_tokens": {"min": 10, "max": 90},
    "references": {"disagree": 4, **_SIDE},
    "arms": {"amortize": {"against_full": _SIDE, "against_reprefill": _SIDE}},
}
CARD = {
    "kind": "leyline-fidelity",
    "model": "<b>tiny</b>",
    "totals": {"constructed": _TOTAL},
    "groups": [{"kind": "constructed", "bucket_chars": 250, "edits": 1, **_TOTAL}],
}
MECHANISM = {
    "kind": "leyline-mechanism",
    "workload": {"sessions": 4, "turns": 3, "system_tokens": 400, "turn_tokens": 100},
    "rows": [
        {"arm": arm, "concurrency": c, "requests": 12, "hit_rate": 0.4, "seconds": 3.0,
         "latency_ms": {"p50": 10.0 * c, "p95": 20.0 * c}}
        for arm in ("stock radix", "amortize") for c in (1, 4)
    ],
    "ttft": [
        {"configuration": "drop+repos", "prompt_tokens": 500, "prefilled_tokens": 60,
         "ttft_ms": {"p50": 5.0, "p95": 9.0}, "summary_ms": None}
    ],
}  # fmt: skip


def test_every_section_is_found_in_a_folder(results: Path) -> None:
    found = collect([results])
    assert {name: len(items) for name, items in found.items()} == {
        "replay": 1, "gym": 1, "drift": 1, "fidelity": 1, "mechanism": 1
    }  # fmt: skip
    for run in found["replay"][0]["runs"]:
        for turn in run["turns"]:
            in_prompt = sum(count for kind, count in turn["blocks"] if kind != "evicted")
            reused = sum(count for kind, count in turn["blocks"] if kind in ("kept", "rotated"))
            assert (in_prompt, reused) == (turn["prompt"], turn["cached"])


@pytest.mark.parametrize(
    ("content", "said"), [("{", "no JSON"), ("[]", "a JSON object"), ('{"kind": "other"}', "not a result file")]
)
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(EvalError, match=said):
        collect([path])
    with pytest.raises(EvalError, match="no such file"):
        collect([tmp_path / "missing.json"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(EvalError, match="nothing to show"):
        collect([tmp_path / "empty"])


@pytest.fixture(scope="module")
def page(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    assert cli.main(["report", str(results), "--out", str(out), "--title", "A & B </title>"]) == 0
    return out


def test_the_page_needs_nothing_else_and_holds_no_prompt_text(page: Path) -> None:
    text = page.read_text()
    assert not re.findall(r"(?:src|href)=\"(?!data:)", text)
    assert "A &amp; B &lt;/title&gt;" in text
    assert "<b>tiny</b>" not in text
    assert "cat_purr" not in text
    assert "session" not in json.loads(re.findall(r'json">(.*?)</script>', text, re.DOTALL)[0])["replay"][0]["runs"][0]


@pytest.mark.skipif(installed() is None, reason="no Chromium is installed: the page is not looked at")
@pytest.mark.slow
def test_the_page_in_a_browser(page: Path) -> None:
    with Browser() as browser:
        browser.open(page)
        assert browser.run("document.title") == "A & B </title>"
        titles = browser.run("[...document.querySelectorAll('h2')].map((e) => e.textContent.split(':')[0])")
        assert titles == ["Replay", "debug-gym", "Mechanism", "Fidelity", "Drift"]
        assert browser.run("document.querySelector('#fidelity-0 h2').textContent") == "Fidelity: <b>tiny</b>"
        _steps_through(browser)
        _fits(browser)
        assert browser.problems == []


def _steps_through(browser: Browser) -> None:
    where = "document.querySelector('.where').textContent"
    widths = "[...document.querySelectorAll('.strip')].map((s) => [...s.querySelectorAll('i')].map((i) => i.className))"
    # It opens on the first turn with an edit: everything but keep-all shows what was evicted.
    opened = browser.run(widths)
    assert "evicted" not in opened[0]
    assert "evicted" in opened[1]
    assert "rotated" not in opened[1]
    assert {"evicted", "rotated"} <= set(opened[2])
    at = int(browser.run(where).split()[1])
    browser.click("[aria-label='Next turn']")
    assert browser.run(where).startswith(f"turn {at + 1} of 7")
    browser.press("ArrowLeft")
    browser.click("[aria-label='Previous turn']")
    assert browser.run(where).startswith(f"turn {at - 1} of 7")
    for _ in range(8):
        browser.click("[aria-label='Previous turn']")
    assert browser.run(where).startswith("turn 1 of 7")
    assert browser.run(widths) == [["fresh"]] * len(ARMS)
    browser.click(".play")
    browser.wait(f"{where}.startsWith('turn 3')")
    browser.click(".play")
    browser.run("(() => { const s = document.querySelector('select'); s.selectedIndex = 1;"
                " s.dispatchEvent(new Event('change')); })()")  # fmt: skip
    assert browser.run("document.querySelector('select').value") == "config"
    assert browser.run("document.querySelectorAll('.stepper svg').length") == 3
    assert browser.run("document.querySelectorAll('#gym-0 .whisker').length") == 2


def _fits(browser: Browser) -> None:
    """Nothing sticks out sideways on a phone, and both schemes are legible."""
    papers = []
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        papers.append(browser.run("getComputedStyle(document.body).backgroundColor"))
        assert browser.run(_CONTRAST) >= 4.5
    assert papers[0] != papers[1]
    browser.resize(360, 740, phone=True)
    assert browser.run("document.documentElement.scrollWidth") <= 360
    assert browser.run("[...document.querySelectorAll('button, select')].every((e) => e.offsetHeight >= 36)")


_CONTRAST = """(() => {
  const light = (colour) => { const [r, g, b] = colour.match(/\\d+/g).map((v) => v / 255)
    .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const paper = light(getComputedStyle(document.querySelector('section')).backgroundColor);
  return Math.min(...[...document.querySelectorAll('p, td, th, .say, h2, .good, .bad')].map((e) => {
    const ink = light(getComputedStyle(e).color);
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  }));
})()"""
