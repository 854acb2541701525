"""Chat templates and their traps: spans and directives are those of what the template really renders.

The templates in ``templates/`` are written for these tests in the manner of well-known ones. They run through the same
library as on the server, with the tokenizer of a real model, so that texts merge across their borders as they do there.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the server environment")

import tokenizers
import transformers

from leyline_client._edits import apply_edits, part_text
from leyline_client._models import Edit, Mode
from leyline_client.policy import resolve
from leyline_server_ext.diff import MIN_RUN
from leyline_server_ext.embedded import ensure_model
from leyline_server_ext.plan import View, as_ids
from leyline_server_ext.render import spans
from leyline_server_ext.sessions import Memory, Session
from leyline_server_ext.turns import ServerFacts, Turn

FOLDER = Path(__file__).parent / "templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
MARKERS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
MARKERS += [f"<｜{name}｜>" for name in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant")]
MARKERS += [f"<｜tool▁{name}｜>" for name in ("call▁begin", "call▁end", "sep", "output▁begin", "output▁end")]
GPT2 = "served"
LLAMA3 = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
"""What Llama 3 and its successors split by: line breaks never merge with the word behind them, unlike in GPT-2's."""
ENDS = ("<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>")

Message = dict[str, Any]
TEXTS = [
    "plain words",
    "  blanks and a newline at the end\n",
    "\n\nnewlines first",
    "tabs\tand\r\nodd ends \t",
    "Ünïcödé, 日本語, 🙂 and e\u0301",
    "def f(x):\n    return x\n\n\n",
    "12345 67890",
    " ",
]


@cache
def tokenizer(pattern: str) -> Any:
    """SmolLM2's vocabulary, splitting by its own pattern or by another."""
    made = transformers.AutoTokenizer.from_pretrained(ensure_model("smollm2"))
    if pattern != GPT2:
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])
    made.add_special_tokens({"additional_special_tokens": MARKERS})
    return made


class Rendering:
    """One template over the tokenizer, as the server would call it."""

    def __init__(self, name: str, pattern: str = LLAMA3) -> None:
        self.template = (FOLDER / f"{name}.jinja").read_text()
        self.tokenizer = tokenizer(pattern)

    def ids(self, messages: Sequence[Message], answer: bool = True) -> list[int]:
        plain = copy.deepcopy(list(messages))
        for message in plain:
            for call in message.get("tool_calls") or ():
                # As SGLang does before it asks the template.
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        text = self.tokenizer.apply_chat_template(
            plain, chat_template=self.template, add_generation_prompt=answer, tokenize=False
        )
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(found["input_ids"]), list(found["offset_mapping"])

    def spans(self, messages: Sequence[Message], ids: list[int]) -> tuple[Any, bool]:
        return spans(messages, ids, render=self.ids, decode=self.decode, offsets=self.offsets)

    def written(self, messages: Sequence[Message], reply: Message) -> list[int]:
        """Tokens of ``reply`` as a model of this template generates them, its end token included."""
        text = self.decode(self.ids([*messages, reply], answer=False))
        text = text.removeprefix(self.decode(self.ids(messages)))
        end = min((text.index(mark) + len(mark) for mark in ENDS if mark in text), default=len(text))
        return self.encode(text[:end])


def call(number: int, name: str = "read", **arguments: Any) -> Message:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def agent_loop(turns: int = 6, *, thinking: bool = False) -> Iterator[tuple[list[Message], Message]]:
    """Histories as an agent sends them, each with the reply it gets. Tool results are awkward texts."""
    messages: list[Message] = [
        {"role": "system", "content": "You fix bugs."},
        {"role": "user", "content": "Fix the failing test.\n"},
    ]
    for number in range(turns):
        said = f"<think>\nLet me see {number}.\n</think>\n\nI look." if thinking else f"I look at {number}."
        calls = [call(10 * number + n, path=f"f{number}_{n}.py") for n in range(1 + number % 2)]
        reply = {"role": "assistant", "content": said, "tool_calls": calls}
        yield list(messages), reply
        messages.append(reply)
        for n, one in enumerate(calls):
            text = "".join(TEXTS[(number + n + k) % len(TEXTS)] + " line of output\n" for k in range(6))
            messages.append({"role": "tool", "tool_call_id": one["id"], "content": text + TEXTS[number % len(TEXTS)]})
        if number == 3:
            messages.append({"role": "user", "content": "And the other one?"})
    yield list(messages), {"role": "assistant", "content": "Done."}


def rendered_as_written(messages: Sequence[Message], found: Sequence[Any], ids: list[int], how: Rendering) -> None:
    for span in found:
        text = part_text(messages[span.message], span.part, span.call) or ""
        shown = how.decode(ids[span.start : span.end])
        # A token may reach over the border of a text, never by more than itself.
        assert text.strip() in shown, (text, shown)
        inner = how.decode(ids[span.start + 1 : span.end - 1]).strip("\ufffd")
        assert inner in text or not inner.strip(), (text, inner)


@pytest.mark.parametrize("name", TEMPLATES)
def test_spans_are_where_the_template_put_the_texts(name: str) -> None:
    how = Rendering(name)
    for messages, _ in agent_loop():
        ids = how.ids(messages)
        found, exact = how.spans(messages, ids)
        assert exact
        rendered_as_written(messages, found, ids, how)
        assert {span.message for span in found} == {n for n, one in enumerate(messages) if one.get("content")}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_text_that_a_template_trims_does_not_cost_the_others_their_spans(name: str, text: str) -> None:
    how = Rendering(name)
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "fine"},
        {"role": "user", "content": "so"},
    ]
    ids = how.ids(messages)
    found, _ = how.spans(messages, ids)
    assert {span.message for span in found} >= {1, 2}
    rendered_as_written(messages, found, ids, how)


def test_a_stripped_text_has_no_span_and_the_reply_says_so() -> None:
    how = Rendering("strips_thinking")
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"},
        {"role": "user", "content": "b"},
    ]
    found, exact = how.spans(messages, how.ids(messages))
    assert not exact
    assert [span.message for span in found] == [0, 2]


def test_instructions_in_mid_conversation_are_found_at_the_front() -> None:
    how = Rendering("merges_system")
    messages = [
        {"role": "system", "content": "first"},
        {"role": "user", "content": "hello"},
        {"role": "developer", "content": "second"},
        {"role": "user", "content": "go"},
    ]
    found, exact = how.spans(messages, how.ids(messages))
    where = {span.message: span.start for span in found}
    assert exact
    assert where[0] < where[2] < where[1] < where[3]


class Conversation:
    """A session's turns, planned as the server plans them; every splice is taken to have happened."""

    def __init__(self, name: str, policy: str, pattern: str = LLAMA3) -> None:
        self.how, self.policies = Rendering(name, pattern), resolve([policy])
        self.session = Session("session-of-a-template", None)
        self.standing: list[Edit] = []

    def turn(self, messages: list[Message], reply: Message) -> Turn:
        new = self.policies.plan(messages, standing=self.standing)
        self.standing += new
        edited = apply_edits(messages, self.standing)
        ids = self.how.ids(edited)
        turn = Turn(self.session, ServerFacts(1, 1 << 20, ()))
        turn.edits = tuple(self.standing)
        turn.plan_messages(as_ids(ids), messages, "forget", lambda: self.how.spans(edited, ids)[0])
        assert turn.plan is not None
        self.source = self.session.memory.view.ids.tolist()
        self.check_directives(turn, ids)
        self.check_kept(turn, edited, ids, {edit.message for edit in new})
        view = View(as_ids([*ids, *self.how.written(edited, reply)]), turn.plan.lineage)
        memory = Memory(view=view, prompt_length=len(ids), digests=turn.digests, edits=turn.edits)
        self.session.advance(memory, keep=False, now=0.0)
        return turn

    def check_directives(self, turn: Turn, target: list[int]) -> None:
        """The changes, carried out on the source, give what the template renders."""
        made, position = [], 0
        for change in turn.changes:
            hunk = change.hunk
            made += self.source[position : hunk.source_start] + target[hunk.target_start : hunk.target_end]
            position = hunk.source_end
        kept = self.source[position:]
        while kept and made + kept != target[: len(made) + len(kept)]:
            kept.pop()
        assert made + kept == target[: len(made) + len(kept)]
        self.kept_to = len(made) + len(kept)

    def check_kept(self, turn: Turn, edited: list[Message], ids: list[int], touched: set[int]) -> None:
        """What is not edited in this turn, and was sent before, is in no change: it keeps its cache."""
        known = len(self.session.memory.digests)
        amortized = all(change.mode is Mode.AMORTIZE for change in turn.changes)
        for span in self.how.spans(edited, ids)[0]:
            if span.message >= known or span.message in touched or not amortized:
                continue
            assert span.end <= self.kept_to + 1, (span, self.kept_to)
            for change in turn.changes:
                overlap = min(span.end, change.hunk.target_end) - max(span.start, change.hunk.target_start)
                # Shorter runs between two changes are computed anew: not worth a segment (see `diff`).
                assert overlap <= 1 or span.end - span.start < MIN_RUN, (span, change)


@pytest.mark.parametrize("policy", ["truncate-older-than-n:n=1,max_chars=30", "clear-tool-uses:trigger=60,keep=1"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_edits_become_directives_of_what_is_really_rendered_and_nothing_kept_drifts(name: str, policy: str) -> None:
    conversation = Conversation(name, policy)
    edited = 0
    for messages, reply in agent_loop():
        turn = conversation.turn(messages, reply)
        assert turn.drift == 0
        assert all(change.mode is Mode.AMORTIZE for change in turn.changes)
        edited += bool(turn.changes)
    assert edited >= 3


def told(name: str, pattern: str, thinking: bool) -> Iterator[tuple[Turn, int]]:
    """Turns of a conversation that edits nothing, and how many tokens of its source each could not keep."""
    conversation = Conversation(name, "truncate-older-than-n:n=99", pattern)
    for messages, reply in agent_loop(thinking=thinking):
        turn = conversation.turn(messages, reply)
        yield (
            turn,
            len(conversation.source) - min(conversation.kept_to, *(c.hunk.source_start for c in turn.changes), 1 << 30),
        )


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_that_only_grows_keeps_every_token(name: str) -> None:
    assert [(turn.changes, turn.drift, lost) for turn, lost in told(name, LLAMA3, False)] == [([], 0, 0)] * 7


@pytest.mark.parametrize(
    ("name", "pattern", "thinking"),
    [("strips_thinking", GPT2, True), ("llama3", GPT2, False)],
    ids=["reasoning is stripped", "the reply's first characters merge with the header"],
)
def test_what_a_template_renders_anew_is_told_as_drift(name: str, pattern: str, thinking: bool) -> None:
    turns = list(told(name, pattern, thinking))
    assert any(lost for _, lost in turns)
    assert [turn.drift for turn, _ in turns] == [lost for _, lost in turns]
