"""``stale-tool-detector``: clears tool outputs that something later has made worthless."""

from __future__ import annotations

import json
import posixpath
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from pydantic import field_validator

from leyline_client.policy import CallFacts, Edit, MessageView, PolicyBase, Transcript

from ._fields import Names, NaturalInt, PositiveInt, Strings, Stub, matches

ERROR_HEAD = 500
"""Characters at each end of an output in which a failure must show."""


@dataclass(frozen=True, eq=False)
class Conventions:
    """How tools are called here. Compared by identity, and made once per set of parameters: it is part of keys."""

    read: tuple[str, ...]
    edit: tuple[str, ...]
    action: tuple[str, ...]
    path: tuple[str, ...]
    errors: tuple[str, ...]


conventions = lru_cache(maxsize=256)(Conventions)


class Call(NamedTuple):
    """What a tool call means under some conventions."""

    kind: str
    """``read``, ``edit`` or ``other``."""
    action: str
    """Tool name, with the value of its action argument where it has one."""
    path: str
    rest: str
    """All other arguments, canonical."""


class Known(NamedTuple):
    """A tool result, as far as it depends on itself and its call only."""

    call: Call
    failed: bool
    """It reports a failure."""
    output: tuple[Call, str]


class StaleToolDetector(PolicyBase):
    """Clears outputs whose content is in the conversation in a newer form, or is no longer true.

    - a read of a file that is read again later, at least as much of it;
    - a read of a file that was edited since;
    - a failed call that was retried with success soon after;
    - an output that the same call gave again later.

    The newest read of a file that was not edited since is never cleared, nor is anything for the sake of a newer
    output that is itself cleared.
    """

    name = "stale-tool-detector"
    summary = "Clears superseded reads, reads of files edited since, retried failures, and duplicates."
    origin = "Leyline paper"
    examples = ({"min_chars": 20}, {"min_chars": 1, "grace": 0, "stub": ""})

    superseded_reads: bool = True
    """Clear a read where the same file is read again later, at least as much of it."""
    edited_since: bool = True
    """Clear a read where the file was edited later."""
    failed_retries: bool = True
    """Clear a failure where a similar call succeeded soon after."""
    duplicates: bool = True
    """Clear an output where the same call gave the same output later."""
    grace: NaturalInt = 1
    """Turns that must have passed since the event that made an output stale (0: it may be in the current turn)."""
    retry_turns: PositiveInt = 3
    """A retry is a success of a similar call at most this many turns after the failure."""
    min_chars: NaturalInt = 80
    """Shorter outputs stay."""
    stub: Stub = "[stale output removed]"
    """Stands for the output. Empty: a pure deletion that leaves the beginning of the first line."""
    exclude_tools: Names = ()
    """Tools whose outputs stay."""
    read_tools: Names = ("read*", "view*", "cat", "open*", "show*", "get_file*")
    """Tools, or values of the action argument, that read a file."""
    edit_tools: Names = (
        "edit*", "write*", "str_replace*", "insert*", "create*", "rewrite*", "replace*", "patch*", "apply*",
        "append*", "delete*", "move*", "rename*", "undo*",
    )  # fmt: skip
    """Tools, or values of the action argument, that change a file."""
    action_keys: Strings = ("command", "action", "operation")
    """Arguments that say which of several things one tool does (``{"command": "view"}``)."""
    path_keys: Strings = ("path", "file_path", "filepath", "file", "filename", "file_name", "target_file")
    """Arguments that hold the path of the file."""
    error_patterns: Strings = (
        r"^\s*[\[<(]?(?:error|exception|fatal|failed|failure|traceback)\b",
        r"\b(?:no such file|not found|permission denied|syntax ?error|invalid argument)",
        r"\bexit(?:ed with)?(?: (?:code|status))?[:= ]+[1-9]",
    )
    """Regular expressions (case ignored) of which one matches near the start or end of a failed call's output."""

    @field_validator("error_patterns")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return patterns

    def plan(self, transcript: Transcript) -> list[Edit]:
        """Clears what later outputs and edits made stale: one pass from the newest output to the oldest."""
        here = conventions(self.read_tools, self.edit_tools, self.action_keys, self.path_keys, self.error_patterns)
        touched, newest = transcript.touched, transcript.turn - self.grace
        later = _Later()
        edits: list[Edit] = []
        for view in reversed(transcript.messages):
            called = view.call
            if called is None or view.index in touched:
                continue
            known = view.derive((here, called), lambda: _know(called, view.text, here))  # noqa: B023
            plan: list[Edit] = []
            if self._stale(view, known, later) and self._may_clear(view):
                plan = view.clear(self.stub)
                edits += plan
            if not plan and view.turn <= newest:
                later.add(view, known)
        return edits

    def _may_clear(self, view: MessageView) -> bool:
        return not (view.protected or len(view.text) < self.min_chars or matches(view.tool, self.exclude_tools))

    def _stale(self, view: MessageView, known: Known, later: _Later) -> bool:
        if known.output in later.outputs and self.duplicates:
            return True
        call = known.call
        if call.path and call.kind == "read":
            if self.edited_since and call.path in later.edited:
                return True
            rests = later.reads.get(call.path)
            if rests and self.superseded_reads and ("{}" in rests or call.rest in rests):
                return True
        return known.failed and self.failed_retries and self._retried(view, call, later)

    def _retried(self, view: MessageView, call: Call, later: _Later) -> bool:
        for other_call, other in reversed(later.successes):
            if other.turn - view.turn > self.retry_turns:
                return False
            if other.turn > view.turn and other_call.action == call.action and _similar(call, other_call):
                return True
        return False


class _Later:
    """What was seen after the output at hand."""

    def __init__(self) -> None:
        self.edited: set[str] = set()
        """Paths that were edited with success."""
        self.reads: defaultdict[str, set[str]] = defaultdict(set)
        """Path to the other arguments of its successful reads."""
        self.outputs: set[tuple[Call, str]] = set()
        self.successes: list[tuple[Call, MessageView]] = []
        """Newest first."""

    def add(self, view: MessageView, known: Known) -> None:
        self.outputs.add(known.output)
        if known.failed:
            return
        call = known.call
        self.successes.append((call, view))
        if not call.path:
            return
        if call.kind == "read":
            self.reads[call.path].add(call.rest)
        elif call.kind == "edit":
            self.edited.add(call.path)


def _know(called: CallFacts, text: str, here: Conventions) -> Known:
    call = _meaning(called.name, called.arguments, here)
    return Known(call, _failed(text, here), (call, text))


def _failed(text: str, here: Conventions) -> bool:
    ends = {text[:ERROR_HEAD], text[-ERROR_HEAD:]}
    return any(re.search(pattern, end, re.IGNORECASE) for pattern in here.errors for end in ends)


@lru_cache(maxsize=8192)
def _meaning(name: str, arguments: str, here: Conventions) -> Call:
    try:
        parsed = json.loads(arguments)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        return Call("other", name, "", arguments)
    action = next((parsed[key] for key in here.action if key in parsed), None)
    word = action if isinstance(action, str) and action.isidentifier() else ""
    path = next((parsed[key] for key in here.path if isinstance(parsed.get(key), str)), "")
    used = {*here.path, *(here.action if word else ())}
    rest = json.dumps({key: value for key, value in parsed.items() if key not in used}, sort_keys=True)
    kind = "other"
    for candidate in (word, name) if word else (name,):
        if matches(candidate, here.read):
            kind = "read"
        elif matches(candidate, here.edit):
            kind = "edit"
        if kind != "other":
            break
    return Call(kind, f"{name} {word}".strip(), posixpath.normpath(path) if path else "", rest)


def _similar(one: Call, other: Call) -> bool:
    """Whether ``other`` can be a retry of ``one``: the same file, a file of that name, or mostly the same words."""
    if one.path and other.path:
        return posixpath.basename(one.path) == posixpath.basename(other.path)
    if one.rest == other.rest:
        return True
    words, more = set(re.findall(r"\w+", one.rest)), set(re.findall(r"\w+", other.rest))
    return len(words & more) * 2 >= len(words | more) > 0
