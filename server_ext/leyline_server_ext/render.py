"""Where each message's text ends up in the rendered tokens, for any chat template.

The template is asked twice: once as usual, once with every text between a pair of private-use characters. Where taking
the marks out of the second rendering gives the first one, the marks say exactly where each text is. A template that
strips a text or a part of it loses its marks: that text then has no span, and the others keep theirs. Many templates
trim white space off both ends, so the marks stand inside of that, and a text of nothing else gets none.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from leyline_client._edits import part_text, with_part_text
from leyline_client._models import Part
from leyline_client._wire import PartSpan

_OPEN, _CLOSE, _DIGIT = "\ue0f0", "\ue0f1", "\ue100"
_MARK = re.compile(f"([{_OPEN}{_CLOSE}])([\ue100-\ue109]+);")

Render = Callable[[list[dict[str, Any]]], list[int]]
Decode = Callable[[list[int]], str]
Offsets = Callable[[str], tuple[list[int], list[tuple[int, int]]]]


def spans(
    messages: Sequence[Mapping[str, Any]],
    token_ids: list[int],
    *,
    render: Render,
    decode: Decode,
    offsets: Offsets,
    only: set[int] | None = None,
) -> tuple[tuple[PartSpan, ...], bool]:
    """Spans of the texts of ``messages`` (of those in ``only``) in ``token_ids``.

    Args:
        messages: OpenAI messages.
        token_ids: what they render to.
        render: messages to token ids, through the served template.
        decode: token ids to text, special tokens kept.
        offsets: text to token ids and the character span of each.

    Returns:
        The spans, by message, and whether every text got one.
    """
    texts = [
        (index, part, call)
        for index, message in enumerate(messages)
        if only is None or index in only
        for part, call in _parts(message)
    ]
    if not texts:
        return (), True
    plain = decode(token_ids)
    found, text = _character_spans(decode(render(_marked(messages, texts))))
    ids, offset_map = offsets(plain)
    if text != plain or ids != list(token_ids):
        return (), False
    starts, ends = [start for start, _ in offset_map], [end for _, end in offset_map]
    result = []
    for number, (index, part, call) in enumerate(texts):
        if number in found:
            low, high = _with_blanks(plain, *found[number], part_text(messages[index], part, call) or "")
            result.append(
                PartSpan(
                    message=index,
                    part=part,
                    call=call,
                    start=bisect.bisect_right(ends, low),
                    end=bisect.bisect_left(starts, high),
                )
            )
    return tuple(result), len(result) == len(texts)


def _parts(message: Mapping[str, Any]) -> list[tuple[Part, int]]:
    # Arguments are parsed as JSON and written anew by the template: no mark can go in there.
    return [(part, 0) for part in (Part.REASONING, Part.CONTENT) if part_text(message, part)]


def _marked(messages: Sequence[Mapping[str, Any]], texts: list[tuple[int, Part, int]]) -> list[dict[str, Any]]:
    marked = [dict(message) for message in messages]
    for number, (index, part, call) in enumerate(texts):
        text = part_text(messages[index], part, call) or ""
        digits = "".join(chr(ord(_DIGIT) + int(digit)) for digit in str(number))
        core = text.strip()
        if not core:
            continue
        before, after = text.split(core, 1)
        inside = f"{before}{_OPEN}{digits};{core}{_CLOSE}{digits};{after}"
        marked[index] = with_part_text(marked[index], part, call, inside)
    return marked


def _with_blanks(plain: str, low: int, high: int, text: str) -> tuple[int, int]:
    """The span with the white space at the ends of ``text``, as far as the template left it."""
    before, after = text.split(text.strip(), 1)
    if before and plain.endswith(before, 0, low):
        low -= len(before)
    if after and plain.startswith(after, high):
        high += len(after)
    return low, high


def _character_spans(marked: str) -> tuple[dict[int, tuple[int, int]], str]:
    """Spans by number, in the text without marks, and that text."""
    opened: dict[int, int] = {}
    found: dict[int, tuple[int, int]] = {}
    pieces: list[str] = []
    length = position = 0
    for match in _MARK.finditer(marked):
        pieces.append(marked[position : match.start()])
        length += len(pieces[-1])
        position = match.end()
        number = int("".join(str(ord(digit) - ord(_DIGIT)) for digit in match[2]))
        if match[1] == _OPEN:
            opened[number] = length
        elif number in opened:
            found[number] = (opened[number], length)
    pieces.append(marked[position:])
    return found, "".join(pieces)
