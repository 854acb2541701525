"""``leyline version``."""

import argparse
from typing import Any

from leyline_client._version import __version__


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommand."""
    subparsers.add_parser("version", help="print the version").set_defaults(run=run)


def run(_arguments: argparse.Namespace) -> int:
    """Print the version."""
    print(__version__)
    return 0
