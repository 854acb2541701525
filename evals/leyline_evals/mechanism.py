"""Hit rate and latency under the paper's load, and AKV's table of the time to first token after compaction.

Arms: SGLang's own radix cache (plain requests, the edited prompt is prefilled again from the edit on), and Leyline with
forget and with amortize. The same tokens in every arm. ``--paper`` takes the published sizes (for a GPU host; with
``--load-format dummy`` on the server only the times mean something).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from leyline_evals import served
from leyline_evals.common import EvalError, provenance, server_facts, server_info
from leyline_evals.machine import write_json
from leyline_evals.mechanism_load import ARMS, PAPER, STOCK, Served, Server, Workload, run_load
from leyline_evals.mechanism_ttft import PAPER_LONG, LongContext, measure
from leyline_evals.replay_summary import columns
from leyline_evals.stats import quantile

SUMMARY = "hit rate and latency under concurrent load"
CONCURRENCIES = (1, 4, 8, 16)
_COLOURS = {STOCK: "#6b7280", "leyline+forget": "#d97706", "leyline+amortize": "#0f766e"}

Progress = Callable[[str], None]


def mechanism(
    base_url: str,
    workload: Workload,
    concurrencies: Sequence[int] = CONCURRENCIES,
    arms: Sequence[str] = ARMS,
    long_context: LongContext | None = None,
    stock_url: str | None = None,
    progress: Progress = print,
) -> dict[str, Any]:
    """Run the load in every arm at every concurrency, then the table of compactions.

    ``stock_url`` names a server without the extension for the stock arm; without it that arm's plain requests go to the
    same server, past the extension, and the result says so.

    Raises:
        ServerDown: a server cannot be reached or ends.
        EvalError: the sizes do not fit the server.
    """
    info = server_info(base_url)
    if workload.longest() + workload.new_tokens >= info.context_length:
        raise EvalError(f"prompts of {workload.longest()} tokens do not fit a context of {info.context_length}")
    rows = []
    with _server(base_url, info.vocab_size) as ours, _server(stock_url or base_url, info.vocab_size) as stock:
        run_load(ours.agents(arms[0], Workload(sessions=1, turns=2)), 1)  # what first requests cost, not measured
        for concurrency in concurrencies:
            for arm in arms:
                server = stock if arm == STOCK else ours
                began = time.monotonic()
                found = run_load(server.agents(arm, workload), concurrency)
                rows.append(_row(arm, concurrency, found, time.monotonic() - began))
                progress(f"{arm} at {concurrency}: hit rate {rows[-1]['hit_rate']:.1%}, p50 "
                         f"{rows[-1]['latency_ms']['p50']:.0f} ms")  # fmt: skip
        ttft = measure(ours, long_context, info.context_length, progress) if long_context else []
    return {
        "kind": "leyline-mechanism",
        "format": 1,
        **provenance(info),
        "server": server_facts(base_url, info),
        "separate_stock_server": stock_url is not None,
        "workload": asdict(workload),
        "rows": rows,
        "long_context": asdict(long_context) if long_context else None,
        "ttft": [row for row in ttft if row["fits"]],
        "does_not_fit": [row["configuration"] for row in ttft if not row["fits"]],
    }


@contextmanager
def _server(base_url: str, vocab_size: int) -> Iterator[Server]:
    server = Server(base_url, vocab_size)
    try:
        yield server
    finally:
        server.close()


def _row(arm: str, concurrency: int, found: Sequence[Served], seconds: float) -> dict[str, Any]:
    times = sorted(one.milliseconds for one in found)
    prompt, cached = sum(one.prompt_tokens for one in found), sum(one.cached_tokens for one in found)
    return {
        "arm": arm,
        "concurrency": concurrency,
        "requests": len(found),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "prefilled_tokens": sum(one.prefilled_tokens for one in found),
        "hit_rate": cached / prompt,
        "latency_ms": {"p50": quantile(times, 0.5), "p95": quantile(times, 0.95)},
        "seconds": round(seconds, 2),
    }


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    rows = [("arm", "concurrency", "requests", "prefilled", "hit rate", "p50 ms", "p95 ms")]
    for row in result["rows"]:
        times = [f"{row['latency_ms'][name]:.0f}" for name in ("p50", "p95")]
        counts = [str(row[name]) for name in ("concurrency", "requests", "prefilled_tokens")]
        rows.append((row["arm"], *counts, f"{row['hit_rate']:.1%}", *times))
    lines = columns(rows)
    compaction = [("compaction", "prompt", "prefilled", "TTFT p50 ms", "p95 ms", "of it summary")]
    for row in result["ttft"]:
        summary = "-" if row["summary_ms"] is None else f"{row['summary_ms']['p50']:.0f}"
        times = [f"{row['ttft_ms'][name]:.0f}" for name in ("p50", "p95")]
        counts = [str(row[name]) for name in ("prompt_tokens", "prefilled_tokens")]
        compaction.append((row["configuration"], *counts, *times, summary))
    if len(compaction) > 1:
        lines += ["", *columns(compaction)]
    lines += [f"{name}: does not fit the context" for name in result["does_not_fit"]]
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> bool:
    """Hit rate and p50 latency over concurrency; False without matplotlib."""
    from leyline_evals.plotting import figure

    try:
        with figure(path, 1, 2, size=(9, 3.6)) as (_, (left, right)):
            for arm in dict.fromkeys(row["arm"] for row in result["rows"]):
                mine = [row for row in result["rows"] if row["arm"] == arm]
                x = [row["concurrency"] for row in mine]
                colour = _COLOURS.get(arm)
                left.plot(x, [100 * row["hit_rate"] for row in mine], "o-", label=arm, color=colour)
                right.plot(x, [row["latency_ms"]["p50"] for row in mine], "o-", label=f"{arm} p50", color=colour)
                right.plot(x, [row["latency_ms"]["p95"] for row in mine], "o:", color=colour, alpha=0.6)
            for axes in (left, right):
                axes.set_xscale("log", base=2)
                axes.set_xticks(x, [str(value) for value in x])
                axes.set_xlabel("concurrency")
                axes.set_ylim(bottom=0)
            left.set_title("Cache hit rate, %")
            right.set_title("Latency, ms (dotted: p95)")
            left.legend()
    except ImportError:
        return False
    return True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    served.add_arguments(parser)
    small = Workload()
    parser.add_argument("--stock-url", metavar="URL", help="a server without the extension, for the stock arm "
                        "(default: plain requests to the same server)")  # fmt: skip
    parser.add_argument("--paper", action="store_true", help="the published sizes: 16 sessions x 6 turns, 4,096 system "
                        "tokens, 2,048 a turn, and a context of 64,000")  # fmt: skip
    for name in ("sessions", "turns", "system_tokens", "turn_tokens", "keep_tokens", "stub_tokens", "new_tokens"):
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, metavar="N", help=f"default {getattr(small, name)}")
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCIES), metavar="N")
    parser.add_argument("--long-context", type=int, metavar="TOKENS", help=f"default {LongContext().length}; 0: none")
    parser.add_argument("--rounds", type=int, metavar="N", help="measurements of each compaction")
    parser.add_argument("--out", type=Path, default=Path("out/mechanism.json"), help="results; a plot lies beside them")


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command."""
    workload, long_context = _sizes(arguments)
    with served.served(arguments, _say) as server:
        result = mechanism(
            server.base_url, workload, arguments.concurrency, long_context=long_context,
            stock_url=arguments.stock_url, progress=_say,
        )  # fmt: skip
    write_json(arguments.out, result)
    print(table(result))
    picture = arguments.out.with_suffix(".png")
    _say(f"{arguments.out} {picture if plot(result, picture) else '(no plot: matplotlib is not installed)'}")
    return 0


def _sizes(arguments: argparse.Namespace) -> tuple[Workload, LongContext | None]:
    base = PAPER if arguments.paper else Workload()
    names = asdict(base)
    chosen = {name: getattr(arguments, name, None) for name in names}
    workload = Workload(**{name: names[name] if value is None else value for name, value in chosen.items()})
    least = {"stub_tokens": 0, "keep_tokens": 0}
    for name, value in asdict(workload).items():
        if value < least.get(name, 1):
            raise EvalError(f"--{name.replace('_', '-')} must be at least {least.get(name, 1)}")
    if workload.keep_tokens + workload.stub_tokens >= workload.turn_tokens or min(arguments.concurrency) < 1:
        raise EvalError("an evicted output must become shorter, and --concurrency be at least 1")
    if arguments.long_context == 0:
        return workload, None
    long = PAPER_LONG if arguments.paper else LongContext()
    length, rounds = arguments.long_context or long.length, arguments.rounds or long.rounds
    head, evicted = min(long.head, length // 8), length // 2
    return workload, LongContext(length, head, evicted, long.append, long.summary, rounds)


def _say(line: str) -> None:
    print(line, flush=True)
