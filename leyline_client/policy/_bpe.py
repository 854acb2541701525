"""A byte-level BPE ``tokenizer.json`` as a tiktoken encoding that counts the same tokens. Reads one file, nothing else.

tiktoken merges the adjacent pair whose joined bytes have the lowest rank; a ``tokenizer.json`` lists pairs in order.
Both give the same tokens if ranks are the positions of the merges and every vocabulary entry that a merge makes is
encoded to itself by the merge list: whenever two tokens that join to an entry are adjacent and all earlier merges
are done, the text of that entry is in the only state from which the list makes it, so the pair is the listed one.
That condition is checked for every entry that has an unlisted split (`_reproducible`).

What counts as a letter or a digit comes from this process's Unicode tables. Characters so new that the server's do not
know them yet (or the other way round) may be split differently there.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from leyline_client._errors import ConfigurationError

from ._tokens import TokenCounter

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
"""What ``ByteLevel`` with ``use_regex`` splits by (the published GPT-2 pattern)."""


def counter_from_file(path: Path) -> TokenCounter:
    """See `TokenCounter.from_tokenizer_json`. The counter is made once per state of the file."""
    try:
        stat = path.stat()
        return _counter(path.resolve(), stat.st_mtime_ns, stat.st_size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{path} is no readable tokenizer.json: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=4)
def _counter(path: Path, mtime_ns: int, size: int) -> TokenCounter:
    del mtime_ns, size  # part of the cache key
    with path.open(encoding="utf-8") as file:
        data = json.load(file)
    return counter_from_data(data, name=path.parent.name or path.name)


def counter_from_data(data: Mapping[str, Any], *, name: str) -> TokenCounter:
    """A counter for the parsed content of a ``tokenizer.json``, or for its `essence`.

    ``exact`` is False where the vocabulary breaks the condition in the module's docstring.

    Raises:
        ConfigurationError: tiktoken is not installed, or the content is no byte-level BPE.
    """
    try:
        import tiktoken
    except ImportError as error:
        raise ConfigurationError("exact token counts need tiktoken: pip install 'leyline-client[tiktoken]'") from error
    model = _byte_level_model(data)
    ranks, order, exact = _ranks(model)
    added = data.get("added_tokens") or ()
    special = {str(token["content"]): len(ranks) + n for n, token in enumerate(added)}
    # Such a token takes the blanks beside it along, or is none inside a word: not reproduced.
    exact = exact and not any(token.get(flag) for token in added for flag in ("lstrip", "rstrip", "single_word"))
    normalize = _normalizer(data.get("normalizer"))
    *splits, pattern = _patterns(data.get("pre_tokenizer"))
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    pieces = _splitter(special, splits, pattern)
    whole = tiktoken.Encoding(f"{name}-piece", pat_str=r"(?s:.+)", mergeable_ranks=ranks, special_tokens={})
    known = frozenset(model["vocab"])
    present = {byte: char for char, byte in _alphabet().items() if char in known}
    absent = [b"\\x%02x" % byte for byte in range(256) if byte not in present]
    lacking = re.compile(b"[" + b"".join(absent) + b"]") if absent else None

    def count_piece(piece: str) -> int:
        if piece in special:
            return 1
        raw = piece.encode()
        if lacking is None or not lacking.search(raw):
            return len(whole.encode_ordinary(piece))
        # A byte that the vocabulary lacks makes no token, and what stands on both sides of it may merge.
        return len(_merge("".join(present[byte] for byte in raw if byte in present), order))

    def count(text: str) -> int:
        text = normalize(_well_formed(text))
        if not splits and (lacking is None or not lacking.search(text.encode())):
            ids = encoding.encode(text, allowed_special="all")
            # tiktoken drops what its pattern does not match; a tokenizer.json keeps it as a piece of its own.
            if len(encoding.decode_bytes(ids)) == len(text.encode()):
                return len(ids)
        return sum(map(count_piece, pieces(text)))

    return TokenCounter(count, exact=exact, name=name)


def essence(data: Mapping[str, Any]) -> bytes:
    """What counts depend on of a ``tokenizer.json``, as canonical JSON: equal bytes for equal vocabularies.

    Raises:
        ConfigurationError: the content is no byte-level BPE that can be reproduced.
    """
    model = _byte_level_model(data)
    whole_words = bool(model.get("ignore_merges"))
    _normalizer(data.get("normalizer"))
    _patterns(data.get("pre_tokenizer"))
    kept = {
        "model": {
            "type": "BPE",
            "ignore_merges": whole_words,
            "merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]],
            "vocab": sorted(entry for entry in model["vocab"] if whole_words or len(entry) == 1),
        },
        "normalizer": data.get("normalizer"),
        "pre_tokenizer": data.get("pre_tokenizer"),
        "added_tokens": [
            {key: token.get(key) for key in ("content", "lstrip", "rstrip", "single_word")}
            for token in data.get("added_tokens") or ()
        ],
    }
    return json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()


def _byte_level_model(data: Mapping[str, Any]) -> Mapping[str, Any]:
    model: Mapping[str, Any] = data["model"]
    odd = ("byte_fallback", "end_of_word_suffix", "continuing_subword_prefix", "dropout")
    if model.get("type") != "BPE" or any(model.get(option) for option in odd):
        raise ConfigurationError("this tokenizer.json is no byte-level BPE")
    return model


def _ranks(model: Mapping[str, Any]) -> tuple[dict[bytes, int], dict[tuple[str, ...], int], bool]:
    alphabet = _alphabet()
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    order = {pair: number for number, pair in enumerate(merges)}
    first: dict[str, int] = {}
    previous, exact = "", True
    for number, (left, right) in enumerate(merges):
        made = left + right
        # Several merges may make one entry; they must follow each other, for then its rank is one number.
        exact = exact and (made not in first or made == previous)
        first.setdefault(made, number)
        previous = made
    ranks = {bytes([byte]): number for number, byte in enumerate(alphabet.values())}
    for made in first:
        try:
            ranks[bytes(alphabet[char] for char in made)] = len(ranks)
        except KeyError:
            raise ConfigurationError(
                "this tokenizer.json is no byte-level BPE: it has merges of other characters"
            ) from None
    return ranks, order, exact and _reproducible(order, {*first, *alphabet}, model)


def _reproducible(order: Mapping[tuple[str, ...], int], known: set[str], model: Mapping[str, Any]) -> bool:
    for entry in known:
        unlisted = any(
            entry[:cut] in known and entry[cut:] in known and (entry[:cut], entry[cut:]) not in order
            for cut in range(1, len(entry))
        )
        if unlisted and len(_merge(entry, order)) > 1:
            return False
    if not model.get("ignore_merges"):
        return True
    # Whole words are then looked up before any merging: an entry no merge makes would be missed here.
    return all(entry in known for entry in model["vocab"] if all(char in _alphabet() for char in entry))


def _merge(word: str, order: Mapping[tuple[str, ...], int]) -> list[str]:
    parts, never = list(word), len(order)
    while len(parts) > 1:
        ranked = [order.get(pair, never) for pair in pairwise(parts)]
        best = min(ranked)
        if best == never:
            break
        at = ranked.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


@lru_cache(maxsize=1)
def _alphabet() -> dict[str, int]:
    """Character to byte: printable ones stand for themselves, the others are moved to 256 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(moved)}


def _normalizer(spec: Mapping[str, Any] | None) -> Callable[[str], str]:
    if spec is None:
        return lambda text: text
    steps = spec["normalizers"] if spec["type"] == "Sequence" else [spec]
    kinds = [str(step["type"]) for step in steps]
    unknown = [kind for kind in kinds if kind not in ("NFC", "NFD", "NFKC", "NFKD")]
    if unknown:
        raise ConfigurationError(f"this tokenizer.json has a normalizer of type {unknown[0]}, which is not supported")

    def normalize(text: str) -> str:
        for kind in kinds:
            text = unicodedata.normalize(kind, text)  # type: ignore[arg-type]
        return text

    return normalize


def _patterns(spec: Mapping[str, Any] | None) -> list[str]:
    """Regular expressions to split by, one after the other; each match and what lies between is a piece."""
    if spec is None:
        return [r"(?s:.+)"]
    found: list[str] = []
    byte_level = False
    for step in spec["pretokenizers"] if spec["type"] == "Sequence" else [spec]:
        kind = step["type"]
        if kind == "ByteLevel" and not step.get("add_prefix_space"):
            byte_level = True
            found += [GPT2_PATTERN] if step.get("use_regex", True) else []
        elif kind == "Digits":
            found.append(r"\p{N}" if step.get("individual_digits") else r"\p{N}+")
        elif kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            which = step["pattern"]
            found.append(str(which["Regex"]) if "Regex" in which else re.escape(str(which["String"])))
        else:
            raise ConfigurationError(f"this tokenizer.json has a pre-tokenizer {kind} that is not supported")
    if not byte_level:
        raise ConfigurationError("this tokenizer.json is no byte-level BPE")
    return found or [r"(?s:.+)"]


def _splitter(special: Iterable[str], splits: list[str], last: str) -> Callable[[str], Iterator[str]]:
    import regex

    longest_first = sorted(special, key=len, reverse=True)
    steps = [regex.compile("|".join(map(regex.escape, longest_first)))] if longest_first else []
    steps += [regex.compile(pattern) for pattern in (*splits, last)]
    known = frozenset(longest_first)

    def pieces(text: str, step: int = 0) -> Iterator[str]:
        if step == len(steps) or (step and text in known):
            yield text
            return
        position = 0
        for match in steps[step].finditer(text):
            start, end = match.span()
            if start == end:
                continue
            if position < start:
                yield from pieces(text[position:start], step + 1)
            yield from pieces(text[start:end], step + 1)
            position = end
        if position < len(text):
            yield from pieces(text[position:], step + 1)

    return pieces


def _well_formed(text: str) -> str:
    """Lone surrogates replaced, as a server does that gets them over JSON."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
