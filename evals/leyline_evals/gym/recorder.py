"""Run a scripted agent in the real environment and record it: ``python -m leyline_evals.gym.recorder [TASK ...]``.

Without a task, every task that has a script is recorded into this package's ``recordings`` folder.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from leyline_evals.gym import _debug_gym as dg
from leyline_evals.gym.confine import confine
from leyline_evals.gym.env import QuietLogger, make_env
from leyline_evals.gym.processes import run_in_child
from leyline_evals.gym.prompt import SYSTEM_PROMPT, instance_prompt
from leyline_evals.gym.recording import RecordedTurn, Recording, recording_path
from leyline_evals.gym.script import Script, load_script
from leyline_evals.gym.tasks import DEBUG_GYM_VERSION, OFFLINE_TASKS, check_tasks


class UnsolvedError(RuntimeError):
    """A scripted agent did not solve its task, or solved it before its last step."""


def record(script: Script, run_folder: Path, recorded: str) -> Recording:
    """Run ``script`` in a fresh environment inside ``run_folder`` (must exist). ``recorded`` is an ISO date.

    The calling process is not confined; :func:`record_confined` is.

    Raises:
        UnsolvedError: unless debug-gym reports ``resolved`` exactly at the last step.
    """
    env = make_env(script.task, run_folder)
    try:
        info = env.reset()
        messages = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": instance_prompt(info.instructions)},
        ]
        turns = []
        for index in range(len(script.steps)):
            if info.terminated:
                raise UnsolvedError(f"{script.task}: ended before step {index + 1}")
            assistant = script.assistant_message(index)
            call = assistant["tool_calls"][0]
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            info = env.step(dg.ToolCall(call["id"], name, arguments), assistant["content"])
            tool = {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": name,
                "content": info.step_observation.observation,
            }
            turns.append(RecordedTurn(assistant, tool, int(info.score)))
        if not info.resolved:
            raise UnsolvedError(f"{script.task}: {info.score} of {info.max_score} tests pass after the last step")
        return Recording(
            task=script.task,
            debug_gym=DEBUG_GYM_VERSION,
            python=platform.python_version(),
            recorded=recorded,
            resolved=True,
            score=int(info.score),
            max_score=int(info.max_score),
            messages=messages,
            tools=tool_schemas(info),
            steps=tuple(turns),
        )
    finally:
        env.close()


def tool_schemas(info: dg.EnvInfo) -> list[dict[str, object]]:
    """The OpenAI tool schemas debug-gym would send for this environment's tools."""
    config = dg.LLMConfig(model="none", context_limit=1)
    return dg.OpenAILLM("none", config, logger=QuietLogger()).define_tools(info.tools)


def record_confined(task: str, recorded: str | None = None) -> Recording:
    """Record ``task`` in a process of its own that cannot write outside its temporary folder.

    Raises:
        UnsolvedError, ConfinementError, ScriptError: from the child.
    """
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    with tempfile.TemporaryDirectory(prefix="leyline-record-") as folder:
        return run_in_child(_record_here, load_script(task), Path(folder), recorded or today)


def _record_here(script: Script, folder: Path, recorded: str) -> Recording:
    confine(folder)
    return record(script, folder, recorded)


def main(argv: Sequence[str] | None = None) -> int:
    """Record tasks and write the files; returns a process exit status."""
    parser = argparse.ArgumentParser(prog="leyline_evals.gym.recorder", description=__doc__)
    parser.add_argument("tasks", nargs="*", default=list(OFFLINE_TASKS), help="default: every offline task")
    parser.add_argument("--out", type=Path, help="folder to write to (default: this package's recordings)")
    arguments = parser.parse_args(argv)
    failed = 0
    for task in check_tasks(arguments.tasks):
        try:
            recording = record_confined(task)
        except UnsolvedError as error:
            print(f"{task}: NOT RECORDED: {error}", file=sys.stderr)
            failed += 1
            continue
        path = arguments.out / f"{task}.jsonl" if arguments.out else recording_path(task)
        path.write_text(recording.to_jsonl(), encoding="utf-8")
        characters = sum(len(message.get("content") or "") for message in recording.transcript())
        print(f"{task}: {len(recording.steps)} steps, {characters} characters of content, resolved")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
