"""Make one self-contained HTML page of result files: replay, debug-gym, mechanism, fidelity, drift."""

from __future__ import annotations

import argparse
from pathlib import Path

from leyline_evals.common import EvalError
from leyline_evals.report.collect import collect
from leyline_evals.report.page import render

SUMMARY = "one HTML page of all results"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="result files, debug-gym folders, or a "
                        "folder of both (out)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("out/report.html"), help="the page (%(default)s)")
    parser.add_argument("--title", default="Leyline evaluations", help="its title (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command."""
    text = render(collect(arguments.paths), arguments.title)
    try:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EvalError(f"{arguments.out}: {error.strerror or error}") from error
    print(f"{arguments.out}, {len(text.encode()) // 1024} KiB")
    return 0
