"""Command line of the overhead measurement. Exit code 0 unless the measurement itself failed."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

import httpx

from leyline_evals.machine import machine_facts, write_json

from . import traffic, translating

GOALS = {"median_ratio": 1.02, "untagged_us": 5.0, "tagged_us": 1_000.0}
_LEYLINE, _STOCK = "leyline", "stock"
_TIMEOUT = 120.0


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and write ``overhead.json``."""
    options = _parser().parse_args(arguments)
    facts = machine_facts()
    try:
        keys = translating.measure()
        _print_goal("untagged key, µs", keys["untagged_us"], GOALS["untagged_us"])
        _print_goal("tagged key, µs", keys["tagged_us"], GOALS["tagged_us"])
        _say(f"  tagged key, first of its lineage: {keys['tagged_first_us']:,.0f} µs")
        models = {name: _model(name, options) for name in options.models}
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except (ImportError, RuntimeError, httpx.HTTPError) as error:
        _say(f"the measurement failed: {type(error).__name__}: {error}")
        return 1
    worst = max(result["median_ratio"] for result in models.values())
    write_json(options.out / "overhead.json", {"median_ratio": worst, "keys": keys, "models": models, "machine": facts})
    _say(f"wrote {options.out / 'overhead.json'}")
    return 0


def _model(name: str, options: argparse.Namespace) -> dict[str, Any]:
    from leyline_server_ext.embedded import EmbeddedServer

    with contextlib.ExitStack() as stack:
        clients = {}
        for kind in (_LEYLINE, _STOCK):
            _say(f"{name}: starting the {kind} server")
            server = stack.enter_context(EmbeddedServer(name, stock=kind == _STOCK, max_total_tokens=16_384))
            http = httpx.Client(base_url=server.base_url, timeout=_TIMEOUT, trust_env=False)
            clients[kind] = stack.enter_context(http)
        shape = {"words": options.words, "new_tokens": options.new_tokens}
        traffic.run(clients, conversations=2, turns=2, **shape)  # not counted: what a server does once
        pairs = traffic.run(clients, conversations=options.conversations, turns=options.turns, **shape)
    result = traffic.figures(pairs, _LEYLINE, _STOCK)
    _print_goal(f"{name}: median latency ratio", result["median_ratio"], GOALS["median_ratio"])
    _say(
        f"  {name}: median of the pairs' ratios: {result['paired_median_ratio']:.3f} over {result['requests']} requests"
    )
    return result


def _print_goal(what: str, value: float, goal: float) -> None:
    _say(f"  {what}: {value:,.3f}   goal <= {goal:g}: {'met' if value <= goal else 'not met'}")


def _say(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m leyline_evals.overhead", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for overhead.json")
    parser.add_argument("--models", nargs="+", default=["tiny-gqa", "tiny-mla", "smollm2"], help="embedded models")
    parser.add_argument("--conversations", type=int, default=12, help="conversations held at once")
    parser.add_argument("--turns", type=int, default=8, help="turns of each")
    parser.add_argument("--words", type=int, default=40, help="words of each question")
    parser.add_argument("--new-tokens", type=int, default=4, help="tokens generated per turn")
    return parser


if __name__ == "__main__":
    sys.exit(main())
