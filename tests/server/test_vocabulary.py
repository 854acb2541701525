"""What the server gives out counts exactly like the tokenizer it serves with, and any other kind is refused."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs the server environment")

from leyline_client import LeylineClient, Unsupported
from leyline_client.policy._bpe import counter_from_data
from leyline_server_ext.embedded import ensure_model
from leyline_server_ext.vocabulary import read

ROOT = Path(__file__).parents[2]
PIECES = [
    "the ",
    "def ",
    "12",
    "3.5",
    "\n",
    "\r\n",
    "  ",
    "\t",
    "é",
    "e\u0301",
    "🙂",
    "👩‍💻",
    "日本",
    "ﬁ",
    "\u2028",
    "\xa0",
    "'s",
    "'LL",
]
PIECES += [
    "<|im_end|>",
    "<|im_start|>user\n",
    "<repo_name>",
    "<|im",
    "\x04",
    "\x1d",
    "\x00",
    "\U000f1234",
    "\U0010ffff",
]

# Which of the unassigned ones is a letter differs with the version of Unicode a library was built with.
CHARACTERS = [code for code in range(0x110000) if unicodedata.category(chr(code)) not in ("Cn", "Cs")]
LOW = [code for code in CHARACTERS if code < 0x3100]


def texts(count: int) -> list[str]:
    """Any character at all, any of the first planes, and what pre-tokenizers treat in special ways."""
    noise = random.Random(3)
    characters = [*map(chr, CHARACTERS)]
    found = [path.read_text() for path in sorted((ROOT / "leyline_client").glob("*.py"))]
    for number in range(count):
        size = noise.randint(1, 60)
        if number % 3 == 0:
            found.append("".join(noise.choices(characters, k=size)))
        elif number % 3 == 1:
            found.append("".join(map(chr, noise.choices(LOW, k=size))))
        else:
            found.append("".join(noise.choices(PIECES, k=size)))
    return found


def tokenizer_of(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(ensure_model(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "tiny-gqa"])
def test_counts_are_those_of_the_served_tokenizer(name: str) -> None:
    tokenizer = tokenizer_of(name)
    vocabulary = read(tokenizer)
    counter = counter_from_data(json.loads(vocabulary.content), name=name)
    assert counter.exact
    wrong = [
        text for text in texts(3_000) if counter.count(text) != len(tokenizer.encode(text, add_special_tokens=False))
    ]
    assert wrong == []


def test_every_single_character_counts_the_same() -> None:
    """Also those of which the vocabulary lacks a byte."""
    tokenizer = tokenizer_of("smollm2")
    counter = counter_from_data(json.loads(read(tokenizer).content), name="smollm2")
    characters = [chr(code) for code in (*LOW, *CHARACTERS[::7])]
    ids = tokenizer(characters, add_special_tokens=False)["input_ids"]
    assert [c for c, found in zip(characters, ids, strict=True) if counter.count(c) != len(found)] == []


def other_kinds() -> dict[str, Any]:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    fallback = Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], byte_fallback=True))
    lower = Tokenizer(models.BPE({"a": 0}, []))
    lower.normalizer, lower.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    return {"Unigram": unigram, "WordPiece": pieces, "BPE with byte fallback": fallback, "Lowercase": lower}


@pytest.mark.parametrize("kind", ["Unigram", "WordPiece", "BPE with byte fallback", "Lowercase"])
def test_another_kind_of_vocabulary_is_refused(kind: str) -> None:
    from transformers import PreTrainedTokenizerFast

    with pytest.raises(Unsupported, match="only known to the server") as refusal:
        read(PreTrainedTokenizerFast(tokenizer_object=other_kinds()[kind]))
    assert refusal.value.detail["reason"] == "tokenizer"


def test_a_tokenizer_of_another_library_is_refused() -> None:
    for tokenizer in (None, object()):
        with pytest.raises(Unsupported, match="tokenizers library"):
            read(tokenizer)


@pytest.mark.slow
@pytest.mark.server
def test_a_client_counts_like_the_running_server(
    server_tiny_gqa: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEYLINE_CACHE", str(tmp_path))
    with LeylineClient(server_tiny_gqa.base_url) as client:
        counter = client.token_counter()
        assert counter.exact
        for text in ("plain", "Ünïcödé 🙂\n", "a<|im_end|>b"):
            reply = client.render([{"role": "user", "content": text}])
            (span,) = reply.spans
            assert counter.count(text) == span.end - span.start
        info = client.tokenizer()
    assert [path.name for path in tmp_path.glob("tokenizers/*")] == [f"{info.digest}.json"]
