"""What the cases come to: the fidelity card of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from leyline_evals.fidelity.compare import Distribution, kl, overlap
from leyline_evals.stats import wilson_interval

FORMAT = 1
OVERLAP_K = 10
METHOD = {
    "constructed": "a stated fact is replaced wherever it was stated; kept are the cases in which full context and "
    "re-prefill of the edited one give different first tokens",
    "deleted": "as constructed, but the sentences that state the fact are taken out and nothing is put in their place",
    "natural": "a tool output of a recorded trajectory is replaced by a stub after the assistant commented on it",
    "agreement": "share of cases with the same most probable next token, with its 95 % Wilson interval",
    "overlap": f"mean share of the {OVERLAP_K} most probable tokens in common",
    "kl": "KL(reference || arm) in nats over the tokens both list and one class of all others: a lower bound",
    "erratum": "a sentence saying what changed is put before the question; nothing is prefilled again (2606.17107)",
}


@dataclass(frozen=True)
class Outcome:
    """One case measured. ``arms``: arm -> its distribution."""

    name: str
    kind: str
    distance: int
    """Tokens from the end of the last edit to the end of the cached context."""
    bucket: int
    edits: int
    full: Distribution
    reprefill: Distribution
    arms: Mapping[str, Distribution]

    @property
    def disagree(self) -> bool:
        """Whether the references give different first tokens."""
        return self.full.first != self.reprefill.first

    @property
    def counts(self) -> bool:
        """Made-up cases count only where the references disagree: elsewhere there is nothing to tell apart."""
        return self.kind == "natural" or self.disagree


def card(head: Mapping[str, Any], outcomes: Sequence[Outcome], tried: Mapping[str, int]) -> dict[str, Any]:
    """The card: ``head`` (model, date, versions) plus totals per kind and a row per kind, distance, edits and arm.

    ``tried`` says per kind how many cases were looked at, also those in which the references agree.
    """
    kinds = sorted({outcome.kind for outcome in outcomes})
    groups: dict[tuple[str, int, int], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.kind, outcome.bucket, outcome.edits), []).append(outcome)
    return {
        "kind": "leyline-fidelity",
        "format": FORMAT,
        **head,
        "method": METHOD,
        "totals": {kind: _total([o for o in outcomes if o.kind == kind], tried.get(kind, 0)) for kind in kinds},
        "groups": [
            {"kind": kind, "bucket_chars": bucket, "edits": edits, **_total(members, None)}
            for (kind, bucket, edits), members in sorted(groups.items())
        ],
    }


def _total(outcomes: Sequence[Outcome], tried: int | None) -> dict[str, Any]:
    arms = sorted({arm for outcome in outcomes for arm in outcome.arms})
    figures: dict[str, Any] = {"cases": len(outcomes)}
    if tried is not None:
        figures["tried"] = tried
    figures["distance_tokens"] = {
        "min": min(outcome.distance for outcome in outcomes),
        "max": max(outcome.distance for outcome in outcomes),
    }
    figures["references"] = {
        "disagree": sum(outcome.disagree for outcome in outcomes),
        **_figures([(outcome.full, outcome.reprefill) for outcome in outcomes]),
    }
    figures["arms"] = {
        arm: {
            "against_full": _figures([(o.full, o.arms[arm]) for o in outcomes]),
            "against_reprefill": _figures([(o.reprefill, o.arms[arm]) for o in outcomes]),
        }
        for arm in arms
    }
    return figures


def _figures(pairs: Iterable[tuple[Distribution, Distribution]]) -> dict[str, Any]:
    both = list(pairs)
    same = wilson_interval(sum(one.first == other.first for one, other in both), len(both))
    divergences = [kl(one, other) for one, other in both]
    return {
        "agreement": round(same.estimate, 4),
        "agreement_low": round(same.low, 4),
        "agreement_high": round(same.high, 4),
        "overlap": round(fmean(overlap(one, other, OVERLAP_K) for one, other in both), 4),
        "kl_mean": round(fmean(divergences), 5),
        "kl_median": round(median(divergences), 5),
    }


def table(found: Mapping[str, Any]) -> str:
    """The totals as text."""
    lines = []
    for kind, total in found["totals"].items():
        references = total["references"]
        lines.append(
            f"{kind}: {total['cases']} of {total['tried']} cases, the references disagree in {references['disagree']} "
            f"(KL {references['kl_mean']:.4f})"
        )
        for arm, sides in total["arms"].items():
            full, edited = sides["against_full"], sides["against_reprefill"]
            lines.append(
                f"  {arm:17} full: same first token {full['agreement']:6.1%}, overlap {full['overlap']:.2f}, "
                f"KL {full['kl_mean']:.4f}   re-prefill: {edited['agreement']:6.1%}, {edited['overlap']:.2f}, "
                f"{edited['kl_mean']:.4f}"
            )
    return "\n".join(lines)
