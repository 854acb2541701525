"""What the Triton kernels share: the rotation in registers."""

# Arguments of a jit function have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl

TL_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

# Minimax over u in [-1/2, 1/2] quarter turns, fitted in float64 (Lawson's iteration on Chebyshev nodes):
# sin(u pi/2) = u * S(u^2) within 1.3e-9, cos(u pi/2) = 1 + u^2 * C(u^2) within 1e-10: below half a float32 unit.
_S0, _S1 = tl.constexpr(1.5707963050854565), tl.constexpr(-0.645962938167305)
_S2, _S3 = tl.constexpr(0.07967590296976623), tl.constexpr(-0.004592289075136952)
_C0, _C1 = tl.constexpr(-1.2337005433534813), tl.constexpr(0.25366924402992225)
_C2, _C3 = tl.constexpr(-0.02086028850813426), tl.constexpr(0.0009040216705461304)

# The interpreter cuts float32 to bfloat16 instead of rounding, and multiplies bfloat16 matrices as integers.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def cos_sin(phase):
    """Cosine and sine, float32, of int64 phases in 2**-64 turns.

    The phase is cut to 32 bits, split into the nearest quarter turn and a rest of at most an eighth of a turn, both
    exact in integers; only the rest becomes float. No table, no slow path, no local memory.
    """
    turn = (phase >> 32).to(tl.int32)
    quarter = (turn + (1 << 29)) >> 30
    u = (turn - (quarter << 30)).to(tl.float32) * (1.0 / (1 << 30))
    z = u * u
    s = u * (_S0 + z * (_S1 + z * (_S2 + z * _S3)))
    c = 1.0 + z * (_C0 + z * (_C1 + z * (_C2 + z * _C3)))
    swap = (quarter & 1) != 0
    cos, sin = tl.where(swap, s, c), tl.where(swap, c, s)
    return tl.where(((quarter + 1) & 2) != 0, -cos, cos), tl.where((quarter & 2) != 0, -sin, sin)


@triton.jit
def turn(a, b, cos, sin):
    """The pair (a, b) turned, in float32."""
    x, y = a.to(tl.float32), b.to(tl.float32)
    return x * cos - y * sin, y * cos + x * sin


@triton.jit
def narrow(x, TYPE: tl.constexpr):
    """float32 rounded to TYPE, to nearest even."""
    if INTERPRETED and tl.bfloat16 == TYPE:
        raw = x.to(tl.int32, bitcast=True)
        return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(TYPE)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b``, summed in float32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def plane_pointer(planes, index, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    """Base address of plane ``index``, known to the compiler to be a multiple of ALIGN bytes."""
    return tl.multiple_of(tl.load(planes + index).to(tl.pointer_type(TYPE)), ALIGN)
