"""Replay recorded debug-gym trajectories through a served model, in every arm.

The tool outputs are the recorded ones in every arm and every request is really served; the recorded assistant message
goes into the history, whatever the model answers. So an arm's cost is measured with any model, however small. A task
is replayed as far as its *unedited* prompts fit the model's context, the same turns in every arm.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyline_client import LeylineClient, LeylineError, Receipt, ServerInfo, TransportError, leyline_of
from leyline_evals import served
from leyline_evals.common import EvalError, ServerDown, provenance, server_facts, server_info
from leyline_evals.gym.arms import DEFAULT_ARMS, UnknownArmError, leyline_session, parse_arm
from leyline_evals.gym.recording import Recording, RecordingError, Turn, load_recording, recorded_tasks
from leyline_evals.gym.results import RunFile, RunKey, SettingsChangedError, finished_keys, read_run
from leyline_evals.machine import write_json
from leyline_evals.replay_summary import summarize, table

SUMMARY = "the cost of every arm on recorded trajectories"
MIN_TURNS = 3
"""A recording of which fewer turns fit the context says nothing about edits."""

SessionFactory = Callable[[str, str, int], Any]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """``max_tokens`` are generated (and dropped) per request; ``max_turns`` cuts every task short, 0 means no limit."""

    max_tokens: int = 1
    max_turns: int = 0


def replay(
    base_url: str,
    tasks: Sequence[str] = (),
    arms: Sequence[str] = DEFAULT_ARMS,
    out: Path = Path("out/evals"),
    options: Options | None = None,
    session_factory: SessionFactory = leyline_session,
    progress: Progress = print,
) -> dict[str, Any]:
    """Replay ``tasks`` (default: all recorded) in ``arms`` and return the summary (`replay_summary.summarize`).

    One request at a time, each run under a cache salt of its own, so the token counts are the same every time. Runs
    finished in ``out`` are not repeated. A task that fails is reported and recorded, and the others go on.

    Raises:
        ServerDown: once; what was finished is kept.
        EvalError: unknown tasks or arms, or ``out`` holds results of other settings.
    """
    options = options or Options()
    recordings = _recordings(tasks or recorded_tasks())
    _check_arms(arms)
    info = server_info(base_url)
    facts = server_facts(base_url, info)
    settings = _settings(facts, info, options)
    keys = [RunKey(arm, recording.task, 0) for recording, arm in itertools.product(recordings, arms)]
    todo = _unfinished(out, keys, settings)
    progress(f"{len(keys)} runs, {len(keys) - len(todo)} already done")
    if todo:
        _warm_up(base_url, session_factory)
    by_task = {recording.task: recording for recording in recordings}
    lengths: dict[str, int] = {}
    for number, key in enumerate(todo, start=1):
        recording = by_task[key.task]
        began = time.monotonic()
        with RunFile(out, key, settings) as file:
            kind, end = _run(base_url, key, recording, options, info, lengths, session_factory, file)
            file.finish(kind, {**end, "seconds": round(time.monotonic() - began, 3)})
        said = f"FAILED: {end['error']}" if kind == "failed" else f"{end['turns']} turns"
        progress(f"[{number}/{len(todo)}] {key.arm} {key.task}: {said} ({time.monotonic() - began:.1f} s)")
    results = [result for key in keys if (result := read_run(key.path(out))) is not None]
    return {
        "kind": "leyline-replay",
        "format": 1,
        **provenance(info),
        "server": facts,
        "settings": settings,
        **summarize(results, arms),
    }


def _run(
    base_url: str,
    key: RunKey,
    recording: Recording,
    options: Options,
    info: ServerInfo,
    lengths: dict[str, int],
    session_factory: SessionFactory,
    file: RunFile,
) -> tuple[str, dict[str, Any]]:
    """One arm on one task; the marker line's kind and fields."""
    try:
        if key.task not in lengths:
            lengths[key.task] = _fitting_turns(base_url, recording, info.context_length - options.max_tokens)
        turns = min(lengths[key.task], options.max_turns or len(recording.steps))
        if turns < MIN_TURNS:
            raise EvalError(f"only {turns} turns fit the context of {info.context_length} tokens")
        session = session_factory(base_url, key.arm, key.seed)
        try:
            for turn in itertools.islice(recording.turns(), turns):
                file.step(_turn(session, recording, turn, options.max_tokens))
        finally:
            session.close()
        return "done", {
            "turns": turns,
            "recorded_turns": len(recording.steps),
            # The recorded outcome, not one of this run: the actions were given.
            "resolved": recording.resolved,
            "score": recording.score,
            "max_score": recording.max_score,
            "ended": "replayed",
        }
    except TransportError as error:
        raise ServerDown(f"no answer from {base_url} in {key.arm} {key.task}: {error}") from error
    except (LeylineError, EvalError, RecordingError) as error:
        return "failed", {"error": f"{type(error).__name__}: {str(error)[:500]}"}


def _turn(session: Any, recording: Recording, turn: Turn, max_tokens: int) -> dict[str, Any]:
    """Serve one recorded request and say what it cost. Its time is the TTFT where one token is asked for."""
    began = time.perf_counter()
    reply = session.chat.completions.create(
        model="default", messages=turn.messages, tools=recording.tools, max_tokens=max_tokens, temperature=0.0
    )
    elapsed = (time.perf_counter() - began) * 1000
    receipt: Receipt = leyline_of(reply).receipt
    return {
        "turn": turn.index,
        "tool": turn.action["tool_calls"][0]["function"]["name"],
        "prompt_tokens": receipt.prompt_tokens,
        "cached_tokens": receipt.cached_tokens,
        "ttft_ms": round(elapsed, 3) if max_tokens == 1 else None,
        "total_ms": round(elapsed, 3),
        "leyline": {"receipt": receipt.model_dump(mode="json", exclude={"pool_before", "pool_after"})},
    }


def _fitting_turns(base_url: str, recording: Recording, limit: int) -> int:
    """How many turns have an unedited prompt of fewer than ``limit`` tokens."""
    with LeylineClient(base_url) as client:
        for turn in recording.turns():
            reply = client.render(turn.messages, tools=recording.tools, return_token_ids=False)
            if reply.prompt_tokens >= limit:
                return turn.index
    return len(recording.steps)


def _warm_up(base_url: str, session_factory: SessionFactory) -> None:
    """Pay what the first request of a server and of a process costs, outside the measurements."""
    session = session_factory(base_url, "keep-all", 0)
    try:
        for _ in range(2):
            message = {"role": "user", "content": "Say yes."}
            session.chat.completions.create(model="default", messages=[message], max_tokens=1, temperature=0.0)
    except TransportError as error:
        raise ServerDown(f"no answer from {base_url}: {error}") from error
    except LeylineError as error:
        raise EvalError(f"{base_url}: {error}") from error
    finally:
        session.close()


def _recordings(tasks: Sequence[str]) -> list[Recording]:
    try:
        return [load_recording(task) for task in tasks]
    except RecordingError as error:
        raise EvalError(str(error)) from error


def _check_arms(arms: Sequence[str]) -> None:
    try:
        for arm in arms:
            parse_arm(arm)
    except UnknownArmError as error:
        raise EvalError(str(error)) from error
    if len(set(arms)) != len(arms) or not arms:
        raise EvalError("name each arm once, and at least one")


def _settings(facts: dict[str, Any], info: ServerInfo, options: Options) -> dict[str, Any]:
    """What must not differ between the runs of one experiment."""
    return {
        "kind": "replay",
        **{name: facts[name] for name in ("model", "context_length", "kv_dtype", "page_size")},
        "sglang": info.sglang_version,
        "extension": info.extension_version,
        "max_tokens": options.max_tokens,
        "max_turns": options.max_turns,
    }


def _unfinished(out: Path, keys: Sequence[RunKey], settings: dict[str, Any]) -> list[RunKey]:
    try:
        finished = finished_keys(out, settings)
    except SettingsChangedError as error:
        raise EvalError(f"{error} (or --fresh)") from error
    return [key for key in keys if key not in finished]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    served.add_arguments(parser)
    names = ", ".join(recorded_tasks())
    parser.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help=f"default: all of {names}")
    parser.add_argument("--arms", nargs="+", default=list(DEFAULT_ARMS), metavar="ARM", help="default: %(default)s")
    parser.add_argument("--max-turns", type=int, default=0, metavar="N", help="of every task; 0: as many as fit")
    parser.add_argument("--max-tokens", type=int, default=1, metavar="N", help="generated per request (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/evals.json"), help="the summary (%(default)s); runs lie "
                        "beside it in a folder of that name without .json")  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="repeat runs that are finished already")


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command; 1 where a task failed or a check does not hold."""
    if arguments.max_tokens < 1 or arguments.max_turns < 0:
        raise EvalError("--max-tokens must be at least 1 and --max-turns at least 0")
    _recordings(arguments.tasks)
    _check_arms(arguments.arms)
    folder: Path = arguments.out.with_suffix("")
    if folder == arguments.out:
        raise EvalError(f"--out must end in .json, not {arguments.out}")
    if arguments.fresh:
        for path in folder.glob("*/*.jsonl"):
            path.unlink()
    began = time.monotonic()
    with served.served(arguments, _say) as server:
        try:
            options = Options(arguments.max_tokens, arguments.max_turns)
            summary = replay(server.base_url, arguments.tasks, arguments.arms, folder, options, progress=_say)
        except ServerDown as error:
            raise ServerDown(f"{error}{server.last_words()}; {folder} keeps what is done") from error
    write_json(arguments.out, summary)
    print(table(summary))
    _say(f"{arguments.out}, {time.monotonic() - began:.0f} s")
    return 0 if not summary["failed"] and all(check["holds"] for check in summary["checks"]) else 1


def _say(line: str) -> None:
    print(line, flush=True)
