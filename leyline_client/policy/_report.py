"""A simulation as a terminal table, and as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ._simulate import EditRow, Simulation, TurnRow

_COLUMNS = ("turn", "messages", "edits", "freed", "full prompt", "prompt", "new", "re-prefill", "amortize")


def as_table(simulation: Simulation) -> str:
    """Plain text, one line per turn and one of totals. Counts are tokens; estimates are marked with ``~``."""
    rows = [_COLUMNS, *(_cells(turn) for turn in simulation.turns), _totals(simulation)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    rule = "-" * len(lines[0])
    return "\n".join(
        [_headline(simulation), "", lines[0], rule, *lines[1:-1], rule, lines[-1], "", _verdict(simulation)]
    )


def as_html(simulations: Sequence[Simulation], *, source: str) -> str:
    """A page with charts and tables: no script, no font, no request; light and dark; fits a phone."""
    bodies = "".join(_section(number, simulation) for number, simulation in enumerate(simulations, 1))
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Leyline simulation: {escape(source)}</title><style>{_STYLE}</style></head>"
        f"<body><main><h1>Leyline simulation</h1><p class=source>{escape(source)}</p>{bodies}{_LEGEND}"
        "</main></body></html>\n"
    )


def _cells(turn: TurnRow) -> tuple[str, ...]:
    counts = (turn.freed_tokens, turn.full_tokens, turn.prompt_tokens, turn.new_tokens)
    costs = (turn.reprefill_tokens, turn.amortize_tokens)
    return tuple(f"{value:,}" for value in (turn.turn, turn.messages, len(turn.edits), *counts, *costs))


def _totals(simulation: Simulation) -> tuple[str, ...]:
    last = simulation.turns[-1] if simulation.turns else None
    edits = sum(len(turn.edits) for turn in simulation.turns)
    ends = (last.full_tokens, last.prompt_tokens) if last else (0, 0)
    sums = [simulation.total(field) for field in ("new_tokens", "reprefill_tokens", "amortize_tokens")]
    freed = simulation.total("freed_tokens")
    return ("all", "", *(f"{value:,}" for value in (edits, freed, *ends, *sums)))


def _headline(simulation: Simulation) -> str:
    counted = "counted exactly" if simulation.exact else "estimated"
    return f"{', '.join(simulation.policies)}: {len(simulation.turns)} turns, tokens {counted} ({simulation.counter})"


def _verdict(simulation: Simulation) -> str:
    turns = sum(1 for turn in simulation.turns if turn.edits)
    churn = simulation.total("reprefill_tokens") - simulation.total("new_tokens")
    extra = simulation.total("amortize_tokens") - simulation.total("new_tokens")
    return (
        f"{turns} of {len(simulation.turns)} turns have edits. They make a server with a prefix cache prefill "
        f"{churn:,} tokens again; with Leyline {extra:,}."
    )


def _section(number: int, simulation: Simulation) -> str:
    last = simulation.turns[-1] if simulation.turns else None
    edits = sum(len(turn.edits) for turn in simulation.turns)
    new, freed = simulation.total("new_tokens"), simulation.total("freed_tokens")
    cards = [
        ("prompt at the end", last.prompt_tokens if last else 0, f"of {last.full_tokens:,}" if last else ""),
        ("edits", edits, f"{freed:,} tokens freed"),
        ("prefix cache prefills", simulation.total("reprefill_tokens"), "tokens in all turns"),
        ("Leyline prefills", simulation.total("amortize_tokens"), f"{new:,} are new anyway"),
    ]
    tiles = "".join(f"<div class=card><span>{a}</span><b>{b:,}</b><small>{c}</small></div>" for a, b, c in cards)
    return (
        f"<section><h2>Conversation {number}</h2><p>{escape(_headline(simulation))}. {escape(_verdict(simulation))}</p>"
        f"<div class=cards>{tiles}</div>"
        "<h3>Prompt tokens</h3>"
        + _chart(simulation.turns, (("full_tokens", "a", "without edits"), ("prompt_tokens", "b", "with edits")))
        + "<h3>Tokens prefilled per turn</h3>"
        + _chart(simulation.turns, (("reprefill_tokens", "a", "prefix cache"), ("amortize_tokens", "b", "Leyline")))
        + _html_table(simulation)
        + "</section>"
    )


_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 220, 66, 24, 26


def _chart(turns: Sequence[TurnRow], series: Sequence[tuple[str, str, str]]) -> str:
    """Paired bars per turn: both series start at zero and share one axis."""
    top = max((getattr(turn, field) for turn in turns for field, _, _ in series), default=0) or 1
    step = (_WIDTH - _LEFT - 8) / max(len(turns), 1)
    bar = min(max(step * 0.4, 1.0), 24.0)
    scale = (_HEIGHT - _BOTTOM - _TOP) / top
    base = _HEIGHT - _BOTTOM
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(_described(series))}">']
    for share in (0.0, 0.5, 1.0):
        y = base - share * top * scale
        parts.append(f"<line class=grid x1={_LEFT} x2={_WIDTH - 8} y1={y:.1f} y2={y:.1f} />")
        parts.append(f"<text class=axis x={_LEFT - 6} y={y + 4:.1f} text-anchor=end>{_short(share * top)}</text>")
    for index, turn in enumerate(turns):
        middle = _LEFT + step * (index + 0.5)
        for place, (field, kind, label) in enumerate(series):
            value = getattr(turn, field)
            x = middle + (place - 1) * bar
            title = f"turn {turn.turn}, {label}: {value:,} tokens"
            parts.append(
                f"<rect class={kind} x={x:.1f} y={base - value * scale:.1f} width={bar * 0.92:.1f} "
                f"height={value * scale:.1f}><title>{escape(title)}</title></rect>"
            )
        if index % max(1, len(turns) // 10) == 0:
            parts.append(f"<text class=axis x={middle:.1f} y={_HEIGHT - 8} text-anchor=middle>{turn.turn}</text>")
    for place, (_, kind, label) in enumerate(series):
        x = _LEFT + place * 190
        parts.append(
            f"<rect class={kind} x={x} y=4 width=12 height=12 /><text class=key x={x + 18} y=14>{label}</text>"
        )
    return "".join([*parts, "</svg>"])


def _described(series: Sequence[tuple[str, str, str]]) -> str:
    return "Bars per turn: " + " and ".join(label for _, _, label in series)


def _short(value: float) -> str:
    return f"{value / 1000:.3g}k" if value >= 1000 else f"{value:.3g}"


def _html_table(simulation: Simulation) -> str:
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    body = []
    for turn in simulation.turns:
        cells = "".join(f"<td>{cell}</td>" for cell in _cells(turn))
        body.append(f"<tr{' class=edited' if turn.edits else ''}>{cells}</tr>")
    foot = "".join(f"<td>{cell}</td>" for cell in _totals(simulation))
    edited = [turn for turn in simulation.turns if turn.edits]
    details = "".join(
        f"<details><summary>Turn {turn.turn}: {len(turn.edits)} edits, {turn.freed_tokens:,} tokens freed</summary>"
        f"<ul>{''.join(f'<li>{_described_edit(edit)}</li>' for edit in turn.edits)}</ul></details>"
        for turn in edited
    )
    return (
        f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
        f"<tfoot><tr>{foot}</tr></tfoot></table></div>" + (f"<h3>Edits</h3>{details}" if details else "")
    )


def _described_edit(edit: EditRow) -> str:
    what = f"{edit.role} message {edit.message}" + (f" ({edit.tool})" if edit.tool else "")
    cost = f"{edit.freed_tokens:,} tokens, {edit.mode}"
    if edit.part == "message":
        return escape(f"{what} removed: {cost}")
    instead = f" → {edit.replacement!r}" if edit.replacement else ""
    return escape(f"{what}, {edit.part}: {edit.characters:,} characters{instead}, {cost}")


_LEGEND = """<section class=notes><h2>How to read this</h2>
<p><b>full prompt</b> is what the agent wrote, <b>prompt</b> what is sent with all edits so far, <b>new</b> the tokens
of messages that came since the turn before. <b>re-prefill</b> is what a server with a prefix cache computes: everything
from the first edited position on. <b>amortize</b> is what Leyline computes: what is new, and replacement texts; from a
forgotten span on, the same as a prefix cache.</p></section>"""

_STYLE = """
:root{color-scheme:light dark;
--bg:#fbfaf8;--fg:#1d2327;--soft:#5b666e;--line:#dcd9d3;--card:#fff;--a:#b9c2c9;--b:#1f6fb2}
@media(prefers-color-scheme:dark){:root{
--bg:#14181b;--fg:#e6e9eb;--soft:#9aa6ae;--line:#2c343a;--card:#1b2125;--a:#6b7881;--b:#62b0ee}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif}
main{max-width:60rem;margin:0 auto;padding:1.25rem}
h1{font-size:1.6rem;margin:0}h2{font-size:1.2rem;margin:1.8rem 0 .4rem}h3{font-size:1rem;margin:1.4rem 0 .4rem}
.source,small{color:var(--soft)}.source{margin:.1rem 0;overflow-wrap:anywhere}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.7rem}
.card{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.7rem .8rem;
display:flex;flex-direction:column}
.card span{color:var(--soft);font-size:.85rem}.card b{font-size:1.5rem;font-variant-numeric:tabular-nums}
svg{width:100%;height:auto;display:block}.a{fill:var(--a)}.b{fill:var(--b)}.grid{stroke:var(--line)}
.axis,.key{fill:var(--soft);font-size:12px}.key{fill:var(--fg);font-size:13px}
.scroll{overflow-x:auto;margin-top:1.4rem}
table{border-collapse:collapse;width:100%;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;text-align:right;white-space:nowrap}th{color:var(--soft);font-weight:600}
thead th,tbody tr:last-child td{border-bottom:1px solid var(--line)}
tr.edited{background:color-mix(in srgb,var(--b) 12%,transparent)}
tfoot td{font-weight:600}details{border-top:1px solid var(--line);padding:.35rem 0}summary{cursor:pointer}
ul{margin:.3rem 0;padding-left:1.2rem;overflow-wrap:anywhere}.notes{color:var(--soft);font-size:.9rem}
@media(max-width:34rem){.axis,.key{font-size:19px}}
"""
