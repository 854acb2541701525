"""``leyline simulate``: what policies would do to a recorded conversation, without a server."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from leyline_client._client import LeylineClient
from leyline_client._errors import LeylineError, PolicyRegistrationError
from leyline_client.policy import PolicySet, PolicySpec, TokenCounter, resolve
from leyline_client.policy._registry import build, parse
from leyline_client.policy._report import as_html, as_table
from leyline_client.policy._simulate import Simulation, read_conversations, simulate


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand. Its ``run`` default takes the parsed arguments and returns the exit status."""
    parser = subparsers.add_parser(
        "simulate",
        help="show offline what policies would edit in a recorded conversation",
        description="Replays a conversation turn by turn: edits, tokens freed, and what they would cost which server.",
    )
    parser.add_argument(
        "transcript",
        type=Path,
        help="JSON lines: one message a line, or the messages of one request a line; - reads standard input",
    )
    parser.add_argument(
        "--policy",
        action="append",
        required=True,
        metavar="SPEC",
        help="name, name:parameter=value,… or module:Class[:parameter=value,…]; repeat for several, in order",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="tokenizer.json of the model, or URL of a server with the extension, for exact counts",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page that needs nothing else")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Simulates and prints. Returns 0, or 2 for bad input."""
    try:
        simulations = _simulations(arguments)
        if arguments.html is not None:
            arguments.html.write_text(as_html(simulations, source=arguments.transcript.name), encoding="utf-8")
    except (LeylineError, OSError, ValueError) as error:
        print(f"leyline: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps([simulation.as_json() for simulation in simulations], indent=2))
    else:
        print("\n\n".join(as_table(simulation) for simulation in simulations))
    return 0


def _simulations(arguments: argparse.Namespace) -> list[Simulation]:
    counter = _counter(arguments.tokenizer) if arguments.tokenizer else None
    policies: PolicySet = resolve([_load(spec) for spec in arguments.policy], counter=counter)
    if str(arguments.transcript) == "-":
        conversations = read_conversations(sys.stdin)
    else:
        with arguments.transcript.open(encoding="utf-8") as file:
            conversations = read_conversations(file)
    if not conversations:
        raise ValueError(f"{arguments.transcript} holds no conversation")
    return [simulate(policies, turns) for turns in conversations]


def _counter(tokenizer: str) -> TokenCounter:
    if not tokenizer.startswith(("http://", "https://")):
        return TokenCounter.from_tokenizer_json(tokenizer)
    with LeylineClient(tokenizer) as client:
        return client.token_counter()


def _load(spec: str) -> PolicySpec:
    """A registered policy by its spec, or a class of your own by ``module:Class``."""
    module, _, rest = spec.partition(":")
    name, _, parameters = rest.partition(":")
    if not name.isidentifier():
        return spec
    sys.path.insert(0, "")
    try:
        factory: Any = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PolicyRegistrationError(f"cannot be imported: {error}", policy=f"{module}:{name}") from error
    finally:
        sys.path.remove("")
    return build(factory, f"{module}:{name}", parse(f"{name}:{parameters}")[1])
