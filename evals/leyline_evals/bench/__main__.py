"""Command line of the benchmark. Exit code 0 unless the measurement itself failed: goals are printed, not enforced."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from leyline_client import LeylineClient, LeylineError
from leyline_evals.machine import machine_facts, write_json

from . import plots, sweep, ttft
from .server import leyline_server, say
from .turns import MeasurementFailed, Shape


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and write ``bench_ttft.json`` and ``.png`` (with ``--sweep`` also ``bench_sweep.*``)."""
    options = _parser().parse_args(arguments)
    try:
        shape = Shape(options.tokens, options.evicted, options.position, options.tail)
        with leyline_server(options.base_url) as base_url, LeylineClient(base_url) as client:
            _measure(client, shape, options)
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except (MeasurementFailed, LeylineError, RuntimeError, ValueError) as error:
        say(f"the measurement failed: {error}")
        return 1
    return 0


def _measure(client: LeylineClient, shape: Shape, options: argparse.Namespace) -> None:
    info = client.info()
    facts = {"model": info.model, "kv_dtype": info.kv_dtype, "page_size": info.page_size}
    out: Path = options.out
    say(f"{shape.context:,} tokens, {shape.evicted} evicted at {shape.position}, {options.rounds} rounds")
    before = machine_facts()
    samples = ttft.measure(client, shape, options.rounds, info.vocab_size)
    result = {**ttft.figures(samples, shape), "server": facts, "machine": before}
    write_json(out / "bench_ttft.json", result)
    say(ttft.report(result))
    _draw(plots.draw_ttft, result, out / "bench_ttft.png")
    if options.sweep:
        say(f"sweep over {', '.join(f'{length:,}' for length in sweep.LENGTHS)} tokens, {options.rounds} rounds each")
        before = machine_facts()
        swept = sweep.sweep(client, options.rounds, info.vocab_size, _model_folder(options))
        swept = {**swept, "server": facts, "machine": before}
        write_json(out / "bench_sweep.json", swept)
        say(sweep.report(swept))
        _draw(plots.draw_sweep, swept, out / "bench_sweep.png")
    say(f"wrote {out}/bench_*.json")


def _model_folder(options: argparse.Namespace) -> Path | None:
    if options.base_url is not None:
        return None
    from leyline_server_ext.embedded import ensure_model

    return ensure_model("smollm2")


def _draw(draw: Any, result: dict[str, Any], path: Path) -> None:
    try:
        draw(result, path)
    except ImportError:
        say("no plot: matplotlib is not installed")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m leyline_evals.bench", description=__doc__)
    parser.add_argument("--base-url", help="a running server (its cache is emptied); default: start the embedded one")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the results")
    parser.add_argument("--rounds", type=int, default=7, help="timed turns per arm (at least 5)")
    parser.add_argument("--tokens", type=int, default=5_000, help="context length")
    parser.add_argument("--evicted", type=int, default=800, help="tokens evicted")
    parser.add_argument("--position", type=int, default=600, help="where the evicted span starts")
    parser.add_argument("--tail", type=int, default=12, help="new tokens of every turn")
    parser.add_argument("--sweep", action="store_true", help="also measure over context lengths, and the graft alone")
    return parser


if __name__ == "__main__":
    sys.exit(main())
