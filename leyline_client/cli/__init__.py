"""The ``leyline`` command. One public module of this package per subcommand; adding one is adding the file.

A module offers ``add_parser(subparsers)``, which adds its parser and sets its default ``run``, a function from the
parsed arguments to the exit status. Modules are imported for ``--help`` too, so what is heavy is imported in ``run``.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules

from leyline_client._errors import LeylineError

COMMANDS = tuple(module.name for module in iter_modules(__path__) if not module.name.startswith("_"))
"""Names of the subcommands, which are the names of their modules."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; its exit status. `argv` defaults to the process's own arguments."""
    parser = argparse.ArgumentParser(prog="leyline", description="KV cache directives for agents, on SGLang.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        import_module(f"leyline_client.cli.{name}").add_parser(subparsers)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except LeylineError as error:
        print(f"leyline: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
