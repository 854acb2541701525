"""The simulator's arithmetic against token lists, what it reads, and what the two commands print."""

from __future__ import annotations

import argparse
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from cases import FIRST
from tool_loops import START, Message, reading

from leyline_client._edits import apply_edits
from leyline_client.cli import policies as policies_command
from leyline_client.cli import simulate as simulate_command
from leyline_client.policy import TokenCounter, resolve
from leyline_client.policy._reference import as_markdown, describe_all
from leyline_client.policy._simulate import read_conversations, requests, simulate
from leyline_client.testing._corpus import corpus

ROOT = Path(__file__).parents[2]
MESSAGES = [*START, *(one for messages in reading(12, 900, files=4) for one in messages)]


def characters(messages: list[Message]) -> str:
    """What the counter below counts, in order: one token per character, none for framing."""
    parts: list[str] = []
    for one in messages:
        parts.append(str(one.get("content") or ""))
        parts.append(one.get("reasoning_content") or "")
        for call in one.get("tool_calls") or ():
            parts += [call["function"]["name"], call["function"]["arguments"]]
    return "".join(parts)


def common(one: str, other: str) -> int:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


@pytest.mark.parametrize(
    "spec",
    ["truncate-older-than-n:n=1,max_chars=90,snap=0", "stale-tool-detector:min_chars=1", "last-n-observations:n=1"],
)
def test_costs_are_those_of_the_texts(spec: str) -> None:
    """One token per character: the prefix a cache keeps is the common prefix of two prompts."""
    policies = resolve([spec], counter=TokenCounter(len, exact=True, per_message=0, name="characters"))
    turns = list(requests(MESSAGES))
    simulation = simulate(policies, turns)
    standing: list[Any] = []
    before = ""
    for row, messages in zip(simulation.turns, turns, strict=True):
        new = policies.plan(messages, standing=standing)
        standing += new
        prompt = characters(apply_edits(messages, standing))
        assert row.prompt_tokens == len(prompt)
        assert row.full_tokens == len(characters(messages))
        # A stub may begin like the text it stands for: the texts then share a little more than the edit says.
        assert 0 <= row.reprefill_tokens - (len(prompt) - common(before, prompt)) <= 2
        assert row.amortize_tokens == row.new_tokens + sum(len(edit.replacement) for edit in new)
        before = prompt


def test_forgetting_costs_what_a_prefix_cache_pays() -> None:
    secret = [{"role": "user", "content": "AKIA" + "ABCDEFGHIJKLMNOP"}, *MESSAGES[2:]]
    rows = simulate(resolve(["redact"]), list(requests([START[0], *secret]))).turns
    assert [row.turn for row in rows if row.edits] == [2]
    assert rows[1].amortize_tokens == rows[1].reprefill_tokens > rows[1].new_tokens


def lines(*values: Any) -> list[str]:
    return [json.dumps(value) for value in values]


def test_every_way_to_write_a_transcript_down() -> None:
    turns = list(requests(MESSAGES))
    assert read_conversations(lines(*MESSAGES)) == [turns]
    assert read_conversations(lines(MESSAGES)) == [turns]
    assert read_conversations(lines({"messages": MESSAGES, "model": "x"})) == [turns]
    assert read_conversations(lines(*turns)) == [turns]
    assert read_conversations([*lines(MESSAGES), "", *lines(START)]) == [turns, [START]]
    assert read_conversations([]) == []


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (["{"], "line 1 is no JSON"),
        (["[]", "3"], "line 2 holds neither"),
        (['["x"]'], "line 1 holds neither"),
        (['{"role": "user"}', "[]"], "mixes"),
    ],
)
def test_a_bad_line_is_named(bad: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_conversations(bad)


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    policies_command.add_parser(commands)
    simulate_command.add_parser(commands)
    return parser.parse_args(arguments)


def run(*arguments: str) -> int:
    parsed = parse(*arguments)
    status: int = parsed.run(parsed)
    return status


@pytest.fixture
def transcript(tmp_path: Path) -> Path:
    path = tmp_path / "transcript.jsonl"
    path.write_text("\n".join(lines(*MESSAGES)), encoding="utf-8")
    return path


class Page(HTMLParser):
    """Collects what the page would load, and whether its elements close."""

    VOID = frozenset({"meta", "line", "rect"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for key, value in attrs if key in ("src", "href", "srcset", "action")]
        if tag not in {"meta", "line"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_simulate_prints_a_table_and_writes_a_page(
    transcript: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    status = run(
        "simulate", "--policy", "stale-tool-detector", "--policy", "truncate-older-than-n:n=1", "--html", str(page),
        str(transcript),
    )  # fmt: skip
    assert status == 0
    printed = capsys.readouterr().out
    assert printed.startswith("stale-tool-detector, truncate-older-than-n: 13 turns, tokens estimated")
    assert len({len(line) for line in printed.splitlines()[2:-2]}) <= 2
    html = page.read_text(encoding="utf-8")
    parsed = Page(html)
    assert parsed.open == []
    assert parsed.loads == []
    assert "script" not in parsed.tags
    assert not re.search(r"https?:|@import|url\(", html)
    assert "prefers-color-scheme:dark" in html
    assert "width=device-width" in html


def test_a_page_escapes_what_the_conversation_brings(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    messages = json.loads(json.dumps(MESSAGES).replace("read_file", evil))
    path = tmp_path / f"{evil.replace('/', '')}.jsonl"
    path.write_text("\n".join(lines(*messages)), encoding="utf-8")
    page = tmp_path / "page.html"
    assert run("simulate", "--policy", "last-n-observations:n=1", "--html", str(page), str(path)) == 0
    assert "script" not in Page(page.read_text(encoding="utf-8")).tags


def test_simulate_as_json_holds_the_totals(transcript: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("simulate", "--policy", "last-n-observations:n=1", "--json", str(transcript)) == 0
    (report,) = json.loads(capsys.readouterr().out)
    # Eleven results are old; the newest of three files was asked for again after it had been cleared, and stays.
    assert report["totals"]["edits"] == sum(len(row["edits"]) for row in report["turns"]) == 8
    assert report["totals"]["amortize_tokens"] < report["totals"]["reprefill_tokens"]
    assert report["exact"] is False


def test_simulate_reads_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines(*MESSAGES))))
    assert run("simulate", "--policy", "clear-thinking", "-") == 0
    assert "13 turns" in capsys.readouterr().out


def test_simulate_takes_a_class_of_your_own(
    transcript: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT / "examples")
    assert run("simulate", "--policy", 'custom_policy:QuietTools:turns=1,tools=["read_file"]', str(transcript)) == 0
    assert "11 of 13 turns have edits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "nothing"], "'nothing': unknown"),
        (["--policy", "truncate-older-than-n:n=0"], "'n'"),
        (["--policy", "attention-mass:turns=1"], "needs server support"),
        (["--policy", "no_module:Class"], "no_module"),
        (["--policy", "clear-thinking", "--tokenizer", "missing.json"], "missing.json"),
        (["--policy", "clear-thinking", "--html", "/no/such/folder/page.html"], "/no/such/folder"),
    ],
)
def test_bad_input_is_named_and_fails(
    arguments: list[str], says: str, transcript: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("simulate", *arguments, str(transcript)) == 2
    streams = capsys.readouterr()
    assert says in streams.err
    assert streams.out == ""


@pytest.mark.parametrize("name", ["missing.jsonl", "empty.jsonl"])
def test_no_transcript_no_simulation(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    assert run("simulate", "--policy", "clear-thinking", str(tmp_path / name)) == 2
    assert name in capsys.readouterr().err


def test_policies_lists_every_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("policies") == 0
    text = capsys.readouterr().out
    assert run("policies", "--json") == 0
    infos = json.loads(capsys.readouterr().out)
    assert {info["name"] for info in infos} >= set(FIRST)
    for info in infos:
        assert info["summary"] in text
        for parameter in info["parameters"]:
            assert parameter["doc"], f"{info['name']}.{parameter['name']} has no doc"
            assert f"{parameter['name']} = {parameter['default']}" in text


def test_policies_can_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("policies", "redact") == 0
    assert capsys.readouterr().out.startswith("redact  (from Leyline)\n")
    assert run("policies", "nothing") == 2
    assert "'nothing'" in capsys.readouterr().err
    assert run("policies", "nothing", "redact") == 2
    assert "redact" in capsys.readouterr().out


def test_every_default_of_the_listing_can_be_written_in_a_spec() -> None:
    for info in describe_all():
        for parameter in info.parameters:
            if parameter.type != "function":
                assert resolve([f"{info.name}:{parameter.name}={parameter.default}"]), (info.name, parameter)


def test_the_reference_page_is_current() -> None:
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    assert page == as_markdown(describe_all()), "run: leyline policies --markdown > docs/policies.md"


def test_conversations_of_every_shape_can_be_simulated() -> None:
    policies = resolve(["redact", "stale-tool-detector", "truncate-older-than-n:n=1,max_chars=10", "clear-thinking"])
    for messages in corpus(20):
        for row in simulate(policies, list(requests(messages))).turns:
            assert 0 <= row.new_tokens <= row.amortize_tokens <= row.reprefill_tokens <= row.prompt_tokens
