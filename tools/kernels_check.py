"""Compile every kernel for sm_80 and sm_90 without a GPU and read the machine code.

For each configuration: registers, shared memory, local memory (spills must be 0), and how wide the loads and stores
of global memory are; of the splice kernels every store must be 16 bytes wide with as many 16-byte loads. Writes
``out/kernels.json``; exit status 1 if something does not hold. Needs torch and triton, whose wheel ships ptxas,
cuobjdump and nvdisasm.

    python tools/kernels_check.py [--only SUBSTRING] [--out out/kernels.json]
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "server_ext"))

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from leyline_server_ext.kernels import KVLayout, RopeSpec, launch_plan, triton_attention, triton_splice  # noqa: E402
from leyline_server_ext.kernels.attention_form import AttentionForm  # noqa: E402

TARGETS = (80, 90)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Config:
    """One kernel as one launch would compile it."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int = 3
    wide_stores: bool = False


@dataclass
class Report:
    """What the compiler made of a Config; bytes for memory, per thread for registers and local memory."""

    name: str
    sm: int
    registers: int
    shared_bytes: int
    local_bytes: int
    spill_instructions: int
    loads: dict[str, int]
    stores: dict[str, int]
    instructions: int
    problems: list[str] = field(default_factory=list)


def _rope(rotary_dim: int, interleaved: bool) -> RopeSpec:
    half = rotary_dim // 2
    return RopeSpec(10000.0 ** -(torch.arange(half, dtype=torch.float64) / half), rotary_dim, interleaved)


def pools(dtype: torch.dtype) -> dict[str, KVLayout]:
    """Pools of the row shapes the documentation speaks of (a few slots: only shapes and strides are compiled in)."""

    def mha(heads: int, head_dim: int, rotary_dim: int, interleaved: bool = False) -> KVLayout:
        k, v = torch.zeros(2, 4, heads, head_dim, dtype=dtype)
        return KVLayout.mha([k], [v], [_rope(rotary_dim, interleaved)])

    return {
        "deepseek-v2-576": KVLayout.mla([torch.zeros(4, 1, 576, dtype=dtype)], [_rope(64, True)], 512),
        "llama-3-8b-8x128": mha(8, 128, 128),
        "qwen2-0.5b-2x64": mha(2, 64, 64),
        "phi-32x96": mha(32, 96, 96),
        "glm-2x128-half": mha(2, 128, 64, interleaved=True),
    }


SPLICE_SIGNATURE = {
    **dict.fromkeys(("src_planes", "dst_planes", "phases", "src_slots", "dst_slots", "deltas"), "*i64"),
    "plane_ropes": "*i32",
    "delta": "i32",
    "rows": "i32",
}


def splice_configs() -> Iterator[Config]:
    """Splice and rotate_in_place for every pool and dtype, with one shift for all rows and one per row."""
    for short, dtype in DTYPES.items():
        for pool, layout in pools(dtype).items():
            (group,) = launch_plan.plane_groups(layout)
            for band_only in (False, True):
                for per_row in (False, True):
                    kernel = "rotate_in_place" if band_only else "splice"
                    yield Config(
                        f"{kernel}/{pool}/{short}/{'per-row' if per_row else 'one-shift'}",
                        triton_splice._splice_kernel,
                        SPLICE_SIGNATURE,
                        triton_splice.constants(group, band_only=band_only, per_row=per_row),
                        triton_splice.NUM_WARPS,
                        wide_stores=True,
                    )


# Query heads of each pool's model, and (query rows of a key head, parts of the sequence) of decode, a long decode, and
# the extend of 16 queries.
QUERY_HEADS = {
    "deepseek-v2-576": 16,
    "llama-3-8b-8x128": 32,
    "qwen2-0.5b-2x64": 14,
    "phi-32x96": 32,
    "glm-2x128-half": 32,
}
ATTENTION_SHAPES = {"decode": (1, 1), "decode-split": (1, 16), "extend": (16, 1)}


def attention_configs() -> Iterator[Config]:
    """Segment attention of every pool and dtype, and the merge of its parts."""
    table = ("phases", "pages", "first_page", "skips", "begins", "ends", "deltas", "requests", "query_starts")
    for short, dtype in DTYPES.items():
        for pool, layout in pools(dtype).items():
            form, heads = AttentionForm.of(layout, 0), QUERY_HEADS[pool]
            for shape, (queries, splits) in ATTENTION_SHAPES.items():
                tile = triton_attention.tiles(form, queries * heads // form.key.buffer.shape[1])
                signature = {
                    "out": f"*{short}" if splits == 1 else "*fp32",
                    "lse": "*fp32",
                    **dict.fromkeys(("query", "key", "value"), f"*{short}"),
                    **dict.fromkeys(table, "*i64"),
                    "scale": "fp32",
                    "queries": "i32",
                    "row_blocks": "i32",
                }
                yield Config(
                    f"segment_attention/{pool}/{short}/{shape}",
                    triton_attention._segment_attention_kernel,
                    signature,
                    triton_attention.constants(form, heads, tile, page=1, splits=splits, rotate=True),
                    tile.warps,
                    tile.stages,
                )
            yield Config(
                f"merge/{pool}/{short}",
                triton_attention._merge_kernel,
                {"out": f"*{short}", "parts": "*fp32", "lse": "*fp32", "rows": "i32"},
                triton_attention.merge_constants(form, 16),
                4,
            )


def compile_one(config: Config, sm: int) -> Report:
    """Compile and disassemble."""
    names = config.kernel.arg_names
    pointers = {(names.index(n),): [["tt.divisibility", 16]] for n, t in config.signature.items() if t[0] == "*"}
    source = ASTSource(
        fn=config.kernel,
        signature={name: config.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in config.constants.items()},
        attrs=pointers,
    )
    options = {"num_warps": config.warps, "num_stages": config.stages}
    built = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        sass = _tool("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing about registers: {usage}")
    registers, stack, local = map(int, found.groups())
    opcodes = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*(?:\.\w+)*)", sass, re.MULTILINE)
    return Report(
        config.name,
        sm,
        registers,
        built.metadata.shared,
        stack + local,
        sum(op.split(".")[0] in ("LDL", "STL") for op in opcodes),
        _widths(opcodes, ("LDG", "LDGSTS")),
        _widths(opcodes, ("STG",)),
        len(opcodes),
    )


def _tool(name: str, *args: str) -> str:
    return subprocess.run([str(TOOLS / name), *args], check=True, capture_output=True, text=True).stdout


def _widths(opcodes: list[str], families: tuple[str, ...]) -> dict[str, int]:
    """How many instructions of each width in bits: ``LDG.E.128`` is "128", plain ``LDG.E`` is "32"."""
    counts: collections.Counter[str] = collections.Counter()
    for opcode in opcodes:
        family, *rest = opcode.split(".")
        if family in families:
            counts[next((part for part in rest if part in ("128", "64", "U16", "U8", "S16")), "32")] += 1
    return dict(sorted(counts.items()))


def problems(config: Config, report: Report) -> list[str]:
    """What does not hold."""
    found = []
    if report.local_bytes or report.spill_instructions:
        found.append(f"spills: {report.local_bytes} bytes of local memory")
    if config.wide_stores and set(report.stores) != {"128"}:
        found.append(f"stores narrower than 16 bytes: {report.stores}")
    if config.wide_stores and report.loads.get("128", 0) < report.stores.get("128", 0):
        found.append(f"loads narrower than 16 bytes: {report.loads}")
    limit = {80: 163, 90: 227}[report.sm] * 1024
    if report.shared_bytes > limit:
        found.append(f"{report.shared_bytes} bytes of shared memory, the card has {limit}")
    return found


def main(argv: list[str] | None = None) -> int:
    """Compile everything; 0 if all holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only configurations whose name contains this")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "kernels.json")
    args = parser.parse_args(argv)
    reports = []
    print(f"{'kernel':<56} {'sm':>3} {'regs':>4} {'smem':>6} {'local':>5}  loads / stores by bits")
    for config in itertools.chain(splice_configs(), attention_configs()):
        for sm in TARGETS if args.only in config.name else ():
            report = compile_one(config, sm)
            report.problems = problems(config, report)
            reports.append(report)
            counts = f"{report.loads} / {report.stores}".replace("'", "")
            print(
                f"{report.name:<56} {sm:>3} {report.registers:>4} {report.shared_bytes:>6} {report.local_bytes:>5}  "
                f"{counts}  {'; '.join(report.problems)}",
                flush=True,
            )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    versions = {"triton": triton.__version__, "torch": torch.__version__}
    args.out.write_text(json.dumps({"versions": versions, "kernels": [asdict(r) for r in reports]}, indent=1) + "\n")
    bad = [report for report in reports if report.problems]
    print(f"{len(reports)} compiled, {len(bad)} with problems; {args.out}")
    return 1 if bad or not reports else 0


if __name__ == "__main__":
    sys.exit(main())
