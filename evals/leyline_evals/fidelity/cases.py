"""Conversations with edits, as messages. Deterministic: the same arguments give the same text."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from leyline_client import Edit
from leyline_evals.gym.recording import Recording

Message = dict[str, Any]
Kind = Literal["constructed", "deleted", "natural"]

STUB = "[output removed]"
ERRATUM = "Correction: {what}. Disregard what was said before about it, and any conclusion drawn from it."

_SYSTEM = "You are a careful assistant. Answer from the records you were shown, in one word."
_WORDS = ("apple", "river", "stone", "music", "garden", "silver", "winter", "bridge", "coffee", "paper", "summer",
          "window", "forest", "candle", "market", "orange")  # fmt: skip
_THINGS = ("pump", "valve", "sensor", "motor", "filter", "switch", "cable", "panel", "relay", "tank")
_STATES = ("was checked", "runs well", "needs oil", "was replaced", "is warm", "was cleaned", "is idle", "was moved")


@dataclass(frozen=True)
class Case:
    """One question put after an edit.

    ``messages`` end with the new user message and the beginning of the assistant's answer, whose next token is asked
    for; all before these two is cached when the edits are made. ``erratum`` says in words what the edits did; it is
    what the repair arm puts before the new user message.
    """

    name: str
    kind: Kind
    distance: int
    """Roughly how many characters lie between the last edit and the question: the bucket it is reported in."""
    messages: tuple[Message, ...]
    edits: tuple[Edit, ...]
    erratum: str


def constructed(seed: int, distance: int, edits: int, *, deleted: bool = False) -> Case:
    """A fact is stated ``edits`` times, commented on, and afterwards replaced by another wherever it was stated.

    With ``deleted`` the sentences that state it are taken out and nothing is put in their place, as in the paper's.

    About ``distance`` characters of unrelated records lie between the last statement and the question. Whether full
    context and re-prefill really disagree is for the model to say: the caller keeps the cases in which they do.
    """
    draw = random.Random(f"leyline fidelity {seed} {distance} {edits}")
    old, new = draw.sample(_WORDS, 2)
    messages: list[Message] = [{"role": "system", "content": _SYSTEM}]
    replaced: list[Edit] = []
    for number in range(edits):
        head, fact = f"Record {number + 1}: {_record(draw)}", f" The code word is {old}."
        start, end = len(head), len(head) + len(fact)
        if not deleted:
            start, end = end - 1 - len(old), end - 1
        replaced.append(Edit(message=len(messages), start=start, end=end, replacement="" if deleted else new))
        messages.append({"role": "user", "content": f"{head}{fact} {_record(draw)}"})
        messages.append({"role": "assistant", "content": "Noted. I will use this code word from now on."})
    filler = ""
    while len(filler) < distance:
        filler += _record(draw) + " "
    messages += [{"role": "user", "content": filler.strip()}, {"role": "assistant", "content": "Noted."}]
    messages += [
        {"role": "user", "content": "Which code word was in the records?"},
        {"role": "assistant", "content": "The code word is"},
    ]
    what = (
        f"no code word is in the records, not {old}" if deleted else f"the code word in the records is {new}, not {old}"
    )
    kind: Kind = "deleted" if deleted else "constructed"
    return Case(f"s{seed}", kind, distance, tuple(messages), tuple(replaced), ERRATUM.format(what=what))


def natural(recording: Recording, max_chars: int) -> Iterator[Case]:
    """Tool outputs evicted after the assistant commented on them, from one recorded trajectory.

    One case per turn whose output is worth evicting: the conversation goes on for one or more turns, then the assistant
    begins its next message with the recorded first word and is asked how it goes on. The tools' schemas are left out.
    """
    start = recording.messages
    for evicted, step in enumerate(recording.steps):
        if len(step.tool.get("content") or "") < 4 * len(STUB):
            continue
        for later in (evicted + 2, evicted + 5):
            if later >= len(recording.steps):
                continue
            kept = recording.steps[max(0, evicted - 1) : later]
            history = [m for one in kept for m in (_comment(one.assistant), _output(one.tool))]
            index = len(start) + 2 * (evicted - max(0, evicted - 1)) + 1
            said = str(recording.steps[later].assistant["content"]).split()
            messages = [*start, *history, {"role": "assistant", "content": said[0]}]
            if sum(len(message["content"]) for message in messages) > max_chars:
                continue
            edit = Edit(message=index, replacement=STUB)
            distance = sum(len(message["content"]) for message in messages[index + 1 : -2])
            what = f"the output of step {evicted + 1} was removed, because it is out of date"
            yield Case(
                f"{recording.task} {evicted}+{later - evicted}",
                "natural",
                _bucket(distance),
                tuple(messages),
                (edit,),
                ERRATUM.format(what=what),
            )


def natural_set(recordings: Sequence[Recording], max_chars: int, count: int) -> list[Case]:
    """``count`` natural cases, taken in turn from every recording so that no task prevails."""
    sources = [list(natural(recording, max_chars)) for recording in recordings]
    longest = max(map(len, sources), default=0)
    mixed = [cases[index] for index in range(longest) for cases in sources if index < len(cases)]
    return mixed[:count]


def _comment(message: Message) -> Message:
    """An assistant turn with its call in words: not every served template knows tool calls."""
    call = message["tool_calls"][0]["function"]
    return {"role": "assistant", "content": f"{message['content']}\n{call['name']}({call['arguments']})"}


def _output(message: Message) -> Message:
    return {"role": "user", "content": f"{message['content']}"}


def _bucket(distance: int) -> int:
    return next((limit for limit in (500, 1000, 2000, 4000) if distance <= limit), 8000)


def _record(draw: random.Random) -> str:
    return f"The {draw.choice(_THINGS)} {draw.randrange(10, 99)} {draw.choice(_STATES)}."
