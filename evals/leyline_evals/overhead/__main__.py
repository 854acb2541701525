"""Command line of the overhead measurement. Exit code 0 unless the measurement itself failed."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from leyline_evals.machine import machine_facts, write_json

from . import traffic, translating

GOALS = {"median_ratio": 1.02, "untagged_us": 5.0, "tagged_us": 1_000.0}
_LEYLINE, _STOCK, _CONTROL = _KINDS = ("leyline", "stock", "control")
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
    worst = max(result["median_ratio"][_LEYLINE] for result in models.values())
    write_json(options.out / "overhead.json", {"median_ratio": worst, "keys": keys, "models": models, "machine": facts})
    _say(f"wrote {options.out / 'overhead.json'}")
    return 0


def _model(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """All starts' requests together. Processes of one program differ, too: a second stock server says by how much."""
    samples: list[traffic.Sample] = []
    starts = []
    for number in range(options.starts):
        shift = number % len(_KINDS)
        taken = _start(name, (*_KINDS[shift:], *_KINDS[:shift]), options)
        starts.append(traffic.figures(taken, _STOCK)["paired_median_ratio"])
        samples += taken
    result = {**traffic.figures(samples, _STOCK), "paired_median_ratio_by_start": starts}
    ratio, paired = result["median_ratio"], result["paired_median_ratio"]
    _print_goal(f"{name}: median latency ratio", ratio[_LEYLINE], GOALS["median_ratio"])
    _say(f"  {name}: a second stock server {ratio[_CONTROL]:.3f}; {result['requests']} requests")
    _say(
        f"  {name}: medians of the requests' ratios {paired[_LEYLINE]:.3f}, second stock server {paired[_CONTROL]:.3f}"
    )
    return result


def _start(name: str, kinds: Sequence[str], options: argparse.Namespace) -> list[traffic.Sample]:
    """The traffic on fresh servers, started in the order of ``kinds``."""
    from leyline_server_ext.embedded import EmbeddedServer

    with contextlib.ExitStack() as stack:
        clients = {}
        for kind in kinds:
            _say(f"{name}: starting the {kind} server")
            server = stack.enter_context(EmbeddedServer(name, stock=kind != _LEYLINE, max_total_tokens=16_384))
            http = httpx.Client(base_url=server.base_url, timeout=_TIMEOUT, trust_env=False)
            clients[kind] = stack.enter_context(http)
        shape = {"words": options.words, "new_tokens": options.new_tokens}
        traffic.run(clients, conversations=2, turns=2, **shape)  # not counted: what a server does once
        return traffic.run(clients, conversations=options.conversations, turns=options.turns, **shape)


def _print_goal(what: str, value: float, goal: float) -> None:
    _say(f"  {what}: {value:,.3f}   goal <= {goal:g}: {'met' if value <= goal else 'not met'}")


def _say(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m leyline_evals.overhead", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for overhead.json")
    parser.add_argument("--models", nargs="+", default=["tiny-gqa", "tiny-mla", "smollm2"], help="embedded models")
    parser.add_argument("--starts", type=int, default=3, help="times the servers are started anew, in changing order")
    parser.add_argument("--conversations", type=int, default=12, help="conversations held at once")
    parser.add_argument("--turns", type=int, default=8, help="turns of each")
    parser.add_argument("--words", type=int, default=40, help="words of each question")
    parser.add_argument("--new-tokens", type=int, default=4, help="tokens generated per turn")
    return parser


if __name__ == "__main__":
    sys.exit(main())
