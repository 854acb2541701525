"""Exact token counts from the server's own vocabulary: fetched once, kept under its digest, else a marked estimate."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from leyline_client import (
    AsyncLeylineClient,
    AsyncLeylineSession,
    ConfigurationError,
    InvalidRequest,
    LeylineClient,
    LeylineSession,
    LeylineWarning,
    ProtocolError,
    TokenizerInfo,
    Unsupported,
    _calls,
)
from leyline_client.cli import main
from leyline_client.policy import Edit, PolicyBase, Transcript
from leyline_client.testing import FakeServer
from tests.client.loops import history

LETTERS = "abcdefghijklmnopqrstuvwxyz .\n"
TOKENIZER: dict[str, Any] = {
    "model": {
        "type": "BPE",
        "vocab": {char: number for number, char in enumerate(LETTERS.replace(" ", "Ġ").replace("\n", "Ċ"))},
        "merges": [["o", "r"], ["w", "or"], ["wor", "d"], ["Ġ", "word"]],
    },
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    "normalizer": None,
    "added_tokens": [{"id": 99, "content": "<|im_end|>", "special": True}],
}
"""Counts "word word" as 2, and nothing for what is not in `LETTERS`."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEYLINE_CACHE", str(tmp_path))
    return tmp_path / "tokenizers"


class Counts(PolicyBase):
    """Notes what the policies are told about tokens."""

    name = "counts"
    seen: list[tuple[bool, int]]

    def plan(self, transcript: Transcript) -> list[Edit]:
        self.seen.append((transcript.counter.exact, transcript.counter.count("word word")))
        return []


def fetches(server: FakeServer) -> list[str]:
    return [path.rpartition("/v1/")[2][:10] for _, path in server.requests if "tokenizer" in path]


def test_the_vocabulary_is_fetched_once_and_counts_without_the_server(cache: Path) -> None:
    server = FakeServer(tokenizer=TOKENIZER)
    first = LeylineClient("http://fake", transport=server.transport).token_counter()
    again = LeylineClient("http://fake", transport=server.transport).token_counter()
    assert first is again
    assert (first.exact, first.count("word word"), first.count("wor<|im_end|>d")) == (True, 2, 3)
    assert fetches(server) == ["tokenizer", "tokenizer/", "tokenizer"]
    assert [path.suffix for path in cache.iterdir()] == [".json"]


def test_equal_vocabularies_of_two_servers_are_one(cache: Path) -> None:
    other = {
        **TOKENIZER,
        "version": "1.0",
        "model": {**TOKENIZER["model"], "merges": ["o r", "w or", "wor d", "Ġ word"]},
    }
    for tokenizer in (TOKENIZER, other):
        server = FakeServer(tokenizer=tokenizer)
        LeylineClient("http://fake", transport=server.transport).token_counter()
    assert fetches(server) == ["tokenizer"]
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"model": 3}'])
def test_a_damaged_copy_is_fetched_again(cache: Path, damage: bytes) -> None:
    server = FakeServer(tokenizer=TOKENIZER)
    client = LeylineClient("http://fake", transport=server.transport)
    client.token_counter()
    (kept,) = cache.iterdir()
    kept.write_bytes(damage)
    assert client.token_counter().count("word word") == 2
    assert fetches(server).count("tokenizer/") == 2
    assert kept.read_bytes() != damage


def test_a_cache_that_cannot_be_written_costs_a_fetch_and_nothing_else(cache: Path) -> None:
    cache.write_text("a file, no folder")
    server = FakeServer(tokenizer=TOKENIZER)
    client = LeylineClient("http://fake", transport=server.transport)
    assert client.token_counter().exact
    assert client.token_counter().exact
    assert fetches(server).count("tokenizer/") == 2


@pytest.mark.parametrize(
    "content",
    [b"something else", json.dumps({"model": {"type": "WordPiece"}}).encode()],
    ids=["other bytes", "no vocabulary"],
)
def test_what_is_not_as_announced_is_refused(content: bytes, cache: Path) -> None:
    info = TokenizerInfo(digest="0" * 64, size=1)

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/tokenizer"):
            return httpx.Response(200, json=info.model_dump())
        return httpx.Response(200, content=content)

    with pytest.raises(ProtocolError, match="not the one it announced"):
        LeylineClient("http://fake", transport=httpx.MockTransport(answer)).token_counter()
    assert not cache.exists()


def test_the_server_refuses_another_digest() -> None:
    client = LeylineClient("http://fake", transport=FakeServer(tokenizer=TOKENIZER).transport)
    with pytest.raises(InvalidRequest, match="another vocabulary"):
        client._call(_calls.vocabulary(TokenizerInfo(digest="0" * 64, size=1)))


def test_a_vocabulary_of_another_kind_leaves_a_marked_estimate() -> None:
    client = LeylineClient("http://fake", transport=FakeServer().transport)
    with pytest.raises(Unsupported) as refusal:
        client.tokenizer()
    assert refusal.value.detail["reason"] == "tokenizer"
    counter = client.token_counter()
    assert not counter.exact
    assert "no byte-level BPE" in counter.name
    assert counter.count("12345678") == 2


def test_without_tiktoken_the_estimate_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    server = FakeServer(tokenizer={**TOKENIZER, "added_tokens": []})
    counter = LeylineClient("http://fake", transport=server.transport).token_counter()
    assert not counter.exact
    assert "leyline-client[tiktoken]" in counter.name


async def test_the_async_client_too() -> None:
    server = FakeServer(tokenizer=TOKENIZER)
    async with AsyncLeylineClient("http://fake", transport=server.async_transport) as client:
        assert (await client.token_counter()).count("word word") == 2
    async with AsyncLeylineClient("http://fake", transport=FakeServer().async_transport) as client:
        assert not (await client.token_counter()).exact


def test_a_session_counts_as_the_server_does_from_its_first_turn() -> None:
    server, policy = FakeServer(tokenizer=TOKENIZER), Counts(seen=[])
    with LeylineSession("http://f", policies=[policy], token_counter="server", transport=server.transport) as session:
        for turns in range(3):
            session.chat.completions.create(model="m", messages=history(turns))
    assert set(policy.seen) == {(True, 2)}
    assert fetches(server) == ["tokenizer", "tokenizer/"]


async def test_an_async_session_too() -> None:
    server, policy = FakeServer(tokenizer=TOKENIZER), Counts(seen=[])
    async with AsyncLeylineSession(
        "http://f", policies=[policy], token_counter="server", transport=server.async_transport
    ) as session:
        await session.chat.completions.create(model="m", messages=history(1))
    assert set(policy.seen) == {(True, 2)}


@pytest.mark.filterwarnings("ignore:the server has no Leyline extension")
@pytest.mark.parametrize(("strategy", "extension"), [("fallback", False), ("observe", False), ("strict", True)])
def test_a_session_that_cannot_count_exactly_estimates_and_says_so(strategy: Any, extension: bool) -> None:
    server, policy = FakeServer(extension=extension), Counts(seen=[])
    with LeylineSession(
        "http://f", policies=[policy], token_counter="server", strategy=strategy, transport=server.transport
    ) as session:
        with pytest.warns(LeylineWarning, match="estimate"):
            session.chat.completions.create(model="m", messages=history(1))
        session.chat.completions.create(model="m", messages=history(2))
    assert set(policy.seen) == {(False, 3)}
    assert len(fetches(server)) == 1


def test_a_session_that_counts_nothing_fetches_nothing() -> None:
    server = FakeServer(tokenizer=TOKENIZER)
    with LeylineSession("http://f", token_counter="server", transport=server.transport) as session:
        session.chat.completions.create(model="m", messages=history(1))
    assert fetches(server) == []
    with pytest.raises(ConfigurationError, match="'server', not 'serve'"):
        LeylineSession("http://f", token_counter="serve")  # type: ignore[arg-type]


def test_simulate_counts_with_the_vocabulary_of_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transcript = tmp_path / "t.jsonl"
    transcript.write_text("\n".join(map(json.dumps, history(3))))
    with FakeServer(tokenizer=TOKENIZER).serve() as url:
        arguments = ["simulate", "--policy", "truncate-older-than-n:n=1,max_chars=20", str(transcript), "--json"]
        assert main([*arguments, "--tokenizer", url]) == 0
    exact = json.loads(capsys.readouterr().out)
    assert main(arguments) == 0
    assert exact != json.loads(capsys.readouterr().out)
