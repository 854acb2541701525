"""How far keys drift when they are rotated again and again, and what that does to scores and to the first token.

A chain of ``n`` rotations stores after each one; rotate-once turns the pristine key by the sum. Both are compared with
the float64 rotation of the same stored key. The paper reports 4.7e-3 relative L2 for one rotation and 2.6e-2 after 100
chained in bfloat16 (technical summary, section 4.3). Float32 math is the kernel the server uses; bfloat16 math is what
it must not do.

    python -m leyline_evals.drift [--out out/drift.json]

Needs torch; transformers for the tiny models (random weights, made on the spot); matplotlib for ``drift.png``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from leyline_evals.drift_models import FirstToken, first_tokens
from leyline_server_ext.kernels import KVLayout, RopeSpec, reference, rotate_in_place

CHAINS = (1, 10, 100, 1000)
STORAGE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STEP = -37
TOKENS, HEADS, HEAD_DIM = 256, 4, 128
ROPE = RopeSpec(10000.0 ** -(torch.arange(HEAD_DIM // 2, dtype=torch.float64) / (HEAD_DIM // 2)), HEAD_DIM, False)

Rotate = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Drift:
    """One row of the table.

    Attributes:
        storage: dtype the key is kept in.
        math: dtype of the rotation.
        rotations: how many.
        chained: False: one rotation by the sum.
        relative_l2: ``|K - exact| / |exact|`` over all keys.
        largest_angle: radians, over the pairs longer than a tenth of the root mean square.
        score_relative_l2: the same as relative_l2 of ``q . K / sqrt(head_dim)`` for normal queries.
        score_largest: largest absolute change of such a score.
    """

    storage: str
    math: str
    rotations: int
    chained: bool
    relative_l2: float
    largest_angle: float
    score_relative_l2: float
    score_largest: float


def by_kernel(key: Tensor, delta: int) -> Tensor:
    """Float32 math: the server's own rotation."""
    turned = key.clone()
    layout = KVLayout.mha([turned], [torch.zeros_like(turned)], [ROPE])
    rotate_in_place(layout, torch.arange(len(key)), delta)
    return turned


def in_bfloat16(key: Tensor, delta: int) -> Tensor:
    """Angles float64, everything after bfloat16."""
    angle = delta * ROPE.inv_freq
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    a, b = key.bfloat16().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(key.dtype)


MATH: dict[str, Rotate] = {"fp32": by_kernel, "bf16": in_bfloat16}


def chain(key: Tensor, rotate: Rotate, rotations: int) -> Tensor:
    """Rotate ``rotations`` times by STEP, storing each time."""
    for _ in range(rotations):
        key = rotate(key, STEP)
    return key


def measure(key: Tensor, got: Tensor, total: int) -> dict[str, float]:
    """Compare ``got`` with the float64 rotation of ``key`` ``(tokens, heads, head_dim)`` by ``total``."""
    exact = reference.rotate(key, torch.full((len(key),), total), ROPE)
    query = torch.randn(64, HEADS, HEAD_DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    score = torch.einsum("qhd,khd->qkh", query, got.double()) * HEAD_DIM**-0.5
    want = torch.einsum("qhd,khd->qkh", query, exact) * HEAD_DIM**-0.5
    return {
        "relative_l2": _relative(got.double(), exact),
        "largest_angle": _largest_angle(got.double(), exact),
        "score_relative_l2": _relative(score, want),
        "score_largest": float((score - want).abs().max()),
    }


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def _largest_angle(got: Tensor, want: Tensor) -> float:
    a, b = want.chunk(2, -1)
    x, y = got.chunk(2, -1)
    angle = torch.atan2(a * y - b * x, a * x + b * y).abs()
    length = (a * a + b * b).sqrt()
    return float(angle[length > 0.1 * length.square().mean().sqrt()].max())


def drifts() -> list[Drift]:
    """Every storage dtype, math and chain length, chained and once."""
    pristine = torch.randn(TOKENS, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    rows = []
    for storage, dtype in STORAGE.items():
        key = pristine.to(dtype)
        for math, rotate in MATH.items():
            for n in CHAINS:
                rows.append(Drift(storage, math, n, True, **measure(key, chain(key, rotate, n), n * STEP)))
                rows.append(Drift(storage, math, n, False, **measure(key, rotate(key, n * STEP), n * STEP)))
    return rows


def table(rows: list[Drift], tokens: list[FirstToken]) -> str:
    """The same as text."""
    lines = [f"{'store':<6}{'math':<6}{'n':>5}  {'way':<8}{'rel L2':>9}{'angle':>10}{'score L2':>10}{'score max':>10}"]
    for row in rows:
        way = "chained" if row.chained else "once"
        lines.append(
            f"{row.storage:<6}{row.math:<6}{row.rotations:>5}  {way:<8}{row.relative_l2:>9.1e}"
            f"{row.largest_angle:>10.1e}{row.score_relative_l2:>10.1e}{row.score_largest:>10.1e}"
        )
    lines.append(f"{'model':<7}{'store':<6}{'n':>5}  {'way':<8}{'same first token':>17}{'logit L2':>10}")
    for token in tokens:
        way = "chained" if token.chained else "once"
        same = f"{token.agreeing}/{token.prompts}"
        start = f"{token.model:<7}{token.storage:<6}{token.rotations:>5}  {way:<8}"
        lines.append(f"{start}{same:>17}{token.logit_relative_l2:>10.1e}")
    return "\n".join(lines)


def plot(rows: list[Drift], path: Path) -> bool:
    """Relative L2 against the number of rotations; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for storage in STORAGE:
        for math in MATH:
            for chained in (True, False):
                line = [r for r in rows if (r.storage, r.math, r.chained) == (storage, math, chained)]
                label = f"{storage}, {math} math, {'chained' if chained else 'once'}"
                style = "o-" if chained else "s:"
                axes.loglog([r.rotations for r in line], [r.relative_l2 for r in line], style, label=label, ms=4)
    axes.set(xlabel="rotations", ylabel="relative L2 error of K", title="Chained rotations against one by the sum")
    axes.legend(fontsize=7, ncols=2)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/drift.json"))
    parser.add_argument("--no-models", action="store_true", help="leave out the first-token part")
    args = parser.parse_args(argv)
    rows = drifts()
    tokens = [] if args.no_models else first_tokens(CHAINS, STORAGE)
    print(table(rows, tokens))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"step": STEP, "drift": [asdict(row) for row in rows], "first_token": [asdict(token) for token in tokens]}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    picture = args.out.with_suffix(".png")
    print(args.out, picture if plot(rows, picture) else "(no plot: matplotlib is not installed)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
