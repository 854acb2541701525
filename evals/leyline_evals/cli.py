"""``leyline-evals``: replay, fidelity, mechanism, debug-gym, report."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from leyline_evals.common import EvalError

COMMANDS = {
    "replay": "leyline_evals.replay",
    "fidelity": "leyline_evals.fidelity.command",
    "mechanism": "leyline_evals.mechanism",
    "debug-gym": "leyline_evals.debug_gym_command",
    "report": "leyline_evals.report.command",
}
"""Name -> module with ``SUMMARY``, ``add_arguments(parser)`` and ``run(arguments) -> exit status``."""

RESUMES = dict.fromkeys(("replay", "debug-gym"), "; start again to continue")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status (0: done and everything checked holds, 1: not, 2: wrong usage, 130: cut off)."""
    parser = argparse.ArgumentParser(prog="leyline-evals", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        loaded = importlib.import_module(module)
        command = commands.add_parser(name, help=loaded.SUMMARY, description=loaded.__doc__)
        loaded.add_arguments(command)
        command.set_defaults(run=loaded.run)
    arguments = parser.parse_args(argv)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return int(arguments.run(arguments))
    except EvalError as error:
        print(f"leyline-evals {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"leyline-evals {arguments.command}: stopped{RESUMES.get(arguments.command, '')}", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_signum: int, _frame: object) -> NoReturn:
    """Treat SIGTERM like Ctrl-C, so that it too ends the embedded server."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
