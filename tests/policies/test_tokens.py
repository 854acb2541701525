"""Token counts: exact against a slow merge-by-merge reference, else marked as estimates; never the internet."""

from __future__ import annotations

import json
import random
import socket
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from leyline_client._errors import ConfigurationError
from leyline_client._wire import PartSpan, RenderReply
from leyline_client.policy import Part, TokenCounter, Transcript, counts_from_render, resolve
from leyline_client.policy._bpe import GPT2_PATTERN, counter_from_data

SAMPLE = (
    "def total(items):\n    return sum(item.price for item in items)  # the total of the items\n"
    "It's 12,345 tests in 2026; they'll pass.\n\n\tTabs\tand  spaces   here. Ünïcödé, 日本語, 🙂🙂.\r\n"
) * 3

BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
TO_CHAR = {byte: chr(byte) for byte in BYTES} | {
    byte: chr(256 + number) for number, byte in enumerate(b for b in range(256) if b not in BYTES)
}


def words(text: str) -> list[str]:
    pieces = regex.findall(GPT2_PATTERN, text)
    return ["".join(TO_CHAR[byte] for byte in piece.encode()) for piece in pieces]


def merge_once(parts: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    index = 0
    while index < len(parts):
        if parts[index : index + 2] == pair:
            out.append("".join(pair))
            index += 2
        else:
            out.append(parts[index])
            index += 1
    return tuple(out)


def train(merges: int) -> list[tuple[str, str]]:
    """Byte-pair merges of `SAMPLE`, most frequent pair first."""
    table = Counter({tuple(word): count for word, count in Counter(words(SAMPLE)).items()})
    learned: list[tuple[str, str]] = []
    for _ in range(merges):
        pairs: Counter[tuple[str, str]] = Counter()
        for parts, count in table.items():
            for pair in pairwise(parts):
                pairs[pair] += count
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        learned.append(best)
        table = Counter({merge_once(parts, best): count for parts, count in table.items()})
    return learned


MERGES = train(300)


def reference(text: str) -> int:
    """All merges in order, each wherever it applies: what the merge list means."""
    total = 0
    for word in words(text):
        parts = tuple(word)
        while True:
            ranked = [(MERGES.index(pair), pair) for pair in pairwise(parts) if pair in MERGES]
            if not ranked:
                break
            first = min(ranked)[1]
            at = next(n for n in range(len(parts)) if parts[n : n + 2] == first)
            parts = (*parts[:at], "".join(first), *parts[at + 2 :])
        total += len(parts)
    return total


def tokenizer(**changes: Any) -> dict[str, Any]:
    vocab = {char: number for number, char in enumerate(TO_CHAR.values())}
    vocab |= {"".join(pair): 256 + number for number, pair in enumerate(MERGES)}
    return {
        "model": {"type": "BPE", "vocab": vocab, "merges": [list(pair) for pair in MERGES]},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "normalizer": None,
        "added_tokens": [
            dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            | {"id": 999, "content": "<|im_end|>", "special": True}
        ],
        **changes,
    }


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("something wants the internet")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


EXACT = counter_from_data(tokenizer(), name="tiny")


@given(st.text(max_size=60) | st.text("items total.\n 12'é🙂", max_size=80))
def test_counts_are_those_of_the_merge_list(text: str) -> None:
    assert EXACT.count(text) == reference(text)


def test_a_trained_vocabulary_is_proven_exact() -> None:
    assert EXACT.exact
    assert EXACT.count(SAMPLE) == reference(SAMPLE)
    assert EXACT.count("a<|im_end|>b") == 3
    assert EXACT.count("") == 0


def test_a_vocabulary_that_merges_otherwise_is_marked() -> None:
    """'abc' is only made of 'ab' and 'c', but 'bc' is merged before 'ab': the list never arrives there, ranks would."""
    merges = [["b", "c"], ["a", "b"], ["ab", "c"]]
    vocab = {char: number for number, char in enumerate([*TO_CHAR.values(), "bc", "ab", "abc"])}
    odd = counter_from_data(tokenizer(model={"type": "BPE", "vocab": vocab, "merges": merges}), name="odd")
    assert not odd.exact


def test_digits_split_off_first_are_counted_like_the_tokenizer_does() -> None:
    steps = [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "add_prefix_space": False}]
    digits = counter_from_data(tokenizer(pre_tokenizer={"type": "Sequence", "pretokenizers": steps}), name="digits")
    assert digits.count("12345") == 5
    assert digits.count("x 2026<|im_end|>") == EXACT.count("x ") + 4 + 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": {"type": "Unigram"}}, "no byte-level BPE"),
        ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "Metaspace"),
    ],
)
def test_what_cannot_be_reproduced_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        counter_from_data(tokenizer(**changes), name="bad")


@pytest.mark.usefixtures("no_network")
def test_a_file_is_read_once_and_nothing_is_downloaded(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer()), encoding="utf-8")
    counter = TokenCounter.from_tokenizer_json(path)
    assert counter is TokenCounter.from_tokenizer_json(str(path))
    assert counter.count("the items") == reference("the items")


@pytest.mark.parametrize("content", ["", "[]", '{"model": 3}', '{"model": {"type": "BPE"}}'])
def test_a_bad_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        TokenCounter.from_tokenizer_json(path)
    with pytest.raises(ConfigurationError, match=r"missing\.json"):
        TokenCounter.from_tokenizer_json(tmp_path / "missing.json")


def test_without_a_vocabulary_counts_are_a_marked_estimate() -> None:
    counter = TokenCounter()
    assert not counter.exact
    assert [counter.count(text) for text in ("", "a", "abcd", "abcde", "日本語")] == [0, 1, 1, 2, 3]
    assert not resolve([]).counter.exact


def test_counts_of_the_server_win_and_the_rest_is_counted_here() -> None:
    messages = [{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "y" * 40}]
    assert [view.tokens for view in Transcript(messages)] == [14, 14]
    assert [view.tokens for view in Transcript(messages, token_counts=[99])] == [99, 14]
    assert not Transcript(messages, token_counts=[99]).exact
    assert Transcript(messages, token_counts=[99, 50]).exact
    assert Transcript(messages, token_counts=[99, 50], tools=[{"type": "function"}]).tokens > 149


def test_counts_come_from_the_spans_of_a_render() -> None:
    spans = [
        (0, Part.CONTENT, 3, 10),
        (2, Part.REASONING, 14, 20),
        (2, Part.CONTENT, 22, 30),
        (3, Part.CONTENT, 33, 40),
    ]
    reply = RenderReply(
        prompt_tokens=45,
        spans=tuple(PartSpan(message=message, part=part, start=start, end=end) for message, part, start, end in spans),
    )
    assert counts_from_render(reply, 4) == [10, 0, 20, 15]
    assert counts_from_render(RenderReply(prompt_tokens=7), 2) == [0, 0]


def test_agreement_with_the_tokenizers_library() -> None:
    library = pytest.importorskip("tokenizers", reason="the tokenizers library is the oracle here")
    oracle = library.Tokenizer.from_str(json.dumps({"version": "1.0", **tokenizer()}))
    noise = random.Random(7)
    for _ in range(200):
        text = "".join(noise.choice(SAMPLE) for _ in range(noise.randint(1, 200)))
        assert EXACT.count(text) == len(oracle.encode(text, add_special_tokens=False).ids)
