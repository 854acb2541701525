"""Run arms on real mini_nightmare environments with a served model. Needs the environment of requirements/evals.txt."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from leyline_evals.common import EvalError
from leyline_evals.gym.arms import DEFAULT_ARMS
from leyline_evals.gym.tasks import DEFAULT_TASKS, OFFLINE_TASKS
from leyline_evals.machine import machine_facts, write_json
from leyline_evals.replay_summary import columns

SUMMARY = "solve rates of arms on real debugging tasks"
_EXPECTED = ("ServerDownError", "SettingsChangedError", "ConfinementError", "UnknownTaskError", "UnknownArmError")
"""What `run_debug_gym` raises for the user to read. By name: the module that defines some needs debug-gym."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--base-url", required=True, metavar="URL", help="an SGLang server with the extension")
    parser.add_argument("--tasks", nargs="+", default=list(DEFAULT_TASKS), metavar="TASK",
                        help=f"of {', '.join(OFFLINE_TASKS)} (default: the eight that need no repair)")  # fmt: skip
    parser.add_argument("--arms", nargs="+", default=list(DEFAULT_ARMS), metavar="ARM",
                        help="keep-all or POLICY[:name=value]+amortize|forget (default: %(default)s)")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 to N-1 (%(default)s)")
    parser.add_argument("--max-steps", type=int, default=50, metavar="N", help="of one run (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="runs at a time (%(default)s)")
    parser.add_argument("--model", default="default", help="name in the requests (%(default)s)")
    parser.add_argument("--temperature", type=float, help="of the requests (default: the server's)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="generated per turn (default: the server's)")
    parser.add_argument("--stream", action="store_true", help="stream, so that the time to first token is measured")
    parser.add_argument("--scripted", action="store_true", help="act as the scripted agents do: cost, not skill")
    parser.add_argument("--keep-transcripts", action="store_true", help="write the messages of every run too")
    parser.add_argument("--unconfined", action="store_true", help="let tasks write outside their folders")
    parser.add_argument("--out", type=Path, default=Path("out/debug-gym"), help="folder of the runs; the summary lies "
                        "beside it as .json (%(default)s)")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command; 1 where runs failed."""
    if arguments.seeds < 1:
        raise EvalError("--seeds must be at least 1")
    try:
        from leyline_evals.gym.run import Options, run_debug_gym
    except ImportError as error:
        raise EvalError(f"{error} (Python 3.12 with requirements/evals.txt has what this needs)") from error
    from leyline_evals.gym.results import read_runs
    from leyline_evals.gym.script import load_script
    from leyline_evals.gym.summary import summarize

    wanted = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    options = Options(
        model=arguments.model,
        request_options={name: value for name, value in wanted.items() if value is not None},
        stream=arguments.stream,
        keep_transcripts=arguments.keep_transcripts,
        confined=not arguments.unconfined,
    )
    try:
        run_debug_gym(
            arguments.base_url, arguments.tasks, arguments.arms, range(arguments.seeds), arguments.max_steps,
            arguments.workers, arguments.out, load_script if arguments.scripted else None, options=options,
            progress=_say,
        )  # fmt: skip
    except Exception as error:
        if type(error).__name__ not in _EXPECTED and not isinstance(error, ValueError):
            raise
        raise EvalError(str(error)) from error
    summary = {"machine": machine_facts(), **summarize(read_runs(arguments.out))}
    path = arguments.out.with_name(arguments.out.name + ".json")
    write_json(path, summary)
    print(table(summary))
    _say(str(path))
    return 1 if any(arm["failed"] for arm in summary["arms"].values()) else 0


def table(summary: dict[str, Any]) -> str:
    """The summary as text."""
    rows = [("arm", "solved", "rate", "95 %", "failed", "turns", "prefilled", "against keep-all", "p")]
    for arm, figures in summary["arms"].items():
        rate, against = figures["solve_rate"], figures.get("against")
        interval = ("-", "-") if rate is None else (f"{rate['estimate']:.1%}", f"{rate['low']:.0%}-{rate['high']:.0%}")
        pairs = f"+{against['only_this']} -{against['only_baseline']} of {against['pairs']}" if against else "-"
        p = f"{against['mcnemar_p']:.3f}" if against else "-"
        counts = [str(figures[name]) for name in ("failed", "turns", "prefilled_tokens")]
        rows.append((arm, f"{figures['solved']}/{figures['runs']}", *interval, *counts, pairs, p))
    return "\n".join(columns(rows))


def _say(line: str) -> None:
    print(line, flush=True)
