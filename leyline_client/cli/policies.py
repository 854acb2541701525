"""``leyline policies``: what there is, with parameters."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap

from leyline_client._errors import PolicyRegistrationError
from leyline_client.policy._reference import PolicyInfo, as_markdown, describe
from leyline_client.policy._registry import names


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand. Its ``run`` default takes the parsed arguments and returns the exit status."""
    parser = subparsers.add_parser(
        "policies",
        help="list the policies with their parameters",
        description="Lists the bundled policies and those of installed packages.",
    )
    parser.add_argument("name", nargs="*", help="only these")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="machine-readable")
    form.add_argument("--markdown", action="store_true", help="the reference page")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the list. Returns 0, or 2 where a policy is unknown or broken; the others are printed all the same."""
    infos: list[PolicyInfo] = []
    status = 0
    for name in arguments.name or names():
        try:
            infos.append(describe(name))
        except PolicyRegistrationError as error:
            print(f"leyline: {error}", file=sys.stderr)
            status = 2
    if arguments.json:
        print(json.dumps([info.as_json() for info in infos], indent=2))
    elif arguments.markdown:
        print(as_markdown(infos), end="")
    elif infos:
        print("\n\n".join(_text(info) for info in infos))
    return status


def _text(info: PolicyInfo) -> str:
    lines = [f"{info.name}  (from {info.origin})" if info.origin else info.name, f"  {info.summary}"]
    for parameter in info.parameters:
        lines.append(f"    {parameter.name} = {parameter.default}   {parameter.type}")
        lines += textwrap.wrap(parameter.doc, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)
