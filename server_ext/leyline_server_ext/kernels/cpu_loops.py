"""The loop that `cpu_splice` runs, compiled. All of it in this file: numba's cache notices only changes of this one.

Numba knows neither bfloat16 nor float16. Their bits come in as uint16 and int16, and are widened and rounded here. Its
integers grow to 64 bits with every operation, which would halve the width of a vector, hence the many ``np.uint32``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

_BITS = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16}

Array: TypeAlias = np.ndarray[Any, Any]

_Index = np.uintp
"""Of no sign: with a signed one numba asks at every access whether it counts from the end."""

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}}


def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    try:
        return njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # there is no folder that the machine code could be kept in
        return njit(**_OPTIONS)(function)


@cache
def row_mover(dtype: torch.dtype, half: int, interleaved: bool, copies: bool) -> Callable[..., None]:
    """The loop over planes and rows, for keys of which ``half`` pairs of columns turn in every head.

    The width is compiled in: vectors of an unknown number would leave a rest to be done one element at a time.

    Args:
        dtype: of the cache.
        half: ``rotary_dim // 2``; 0 where nothing is rotary.
        interleaved: pairs are ``(2i, 2i + 1)``, not ``(i, i + half)``.
        copies: rows are copied first; else only the rotary columns of the target change.

    Returns:
        A function of

        - claimed: ``(1,)`` int64, blocks that have been claimed, 0 at first. All threads that are to share the work
          call the function with the same one, and each returns when nothing is left to claim;
        - block: rows in a block;
        - src, dst: ``(rows,)`` int64 slots. Those of ``dst`` are all different; where rows are copied within a plane,
          none of them is in ``src``;
        - which: ``(rows,)`` int64, the line of ``cos`` and ``sin`` that a row takes; -1: it is not turned;
        - from_planes, to_planes: ``(planes,)`` int64 addresses, **the memory behind the second changes**. Each is
          followed by its stride, in elements from one slot to the next;
        - ropes: ``(planes,)`` int32, the rope of ``cos`` and ``sin`` that a plane takes; -1: it is not turned;
        - heads, width, start: heads of a slot, elements of a head, and its first rotary column;
        - cos, sin: ``(lines, ropes, half)`` float32.
    """
    bits = _BITS[dtype]
    one, step = (1, 2) if interleaved else (half, 1)

    @_compiled
    def mover(
        claimed: Array,
        block: int,
        src: Array,
        dst: Array,
        which: Array,
        from_planes: Array,
        from_stride: int,
        to_planes: Array,
        to_stride: int,
        ropes: Array,
        heads: int,
        width: int,
        start: int,
        cos: Array,
        sin: Array,
    ) -> None:
        rows = src.shape[0]
        blocks = (rows + block - 1) // block
        while True:
            claim = _claim(claimed)
            if claim >= blocks * ropes.shape[0]:
                return
            plane, begin = claim // blocks, claim % blocks * block
            source = carray(_pointer(from_planes[plane]), (1,), bits)
            target = carray(_pointer(to_planes[plane]), (1,), bits)
            rope = ropes[plane]
            for row in range(begin, min(begin + block, rows)):
                to = _Index(dst[row] * to_stride)
                if copies:
                    at = _Index(src[row] * from_stride)
                    for i in range(heads * width):
                        target[to + _Index(i)] = source[at + _Index(i)]
                line = which[row]
                if line < 0 or rope < 0:
                    continue
                for head in range(heads):
                    low = _Index(to + _Index(head * width + start))
                    for i in range(half):
                        first = _Index(low + _Index(i * step))
                        second = _Index(first + _Index(one))
                        x, y = target[first], target[second]
                        a, b, c, s = _wide(x), _wide(y), cos[line, rope, i], sin[line, rope, i]
                        target[first] = _narrow(a * c - b * s, x)
                        target[second] = _narrow(b * c + a * s, y)

    return mover


@intrinsic
def _claim(typing: Any, claimed: Any) -> Any:  # noqa: ARG001
    """Add one to the only element of an int64 array, and what it was before, atomically."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.atomic_rmw("add", array.data, context.get_constant(types.int64, 1), "monotonic")

    return types.int64(claimed), generate


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:  # noqa: ARG001
    """An address as a pointer to anything."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


def _wide(bits: Any) -> Any:
    """An element as a float32."""
    raise NotImplementedError


def _narrow(value: Any, like: Any) -> Any:
    """A float32 as an element of the same kind as ``like``, rounded to nearest even."""
    raise NotImplementedError


@overload(_wide, strict=False)
def _typed_wide(bits: Any) -> Callable[..., Any]:
    return {types.float32: _wide_float32, types.uint16: _wide_bfloat16, types.int16: _wide_float16}[bits]


@overload(_narrow, strict=False)
def _typed_narrow(value: Any, like: Any) -> Callable[..., Any]:  # noqa: ARG001
    return {types.float32: _narrow_float32, types.uint16: _narrow_bfloat16, types.int16: _narrow_float16}[like]


def _wide_float32(bits: Any) -> Any:
    return bits


def _narrow_float32(value: Any, like: Any) -> Any:  # noqa: ARG001
    return value


def _wide_bfloat16(bits: Any) -> Any:
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


def _narrow_bfloat16(value: Any, like: Any) -> Any:  # noqa: ARG001
    full = np.float32(value).view(np.uint32)
    odd = np.uint32(np.uint32(full >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(np.uint32(full + np.uint32(0x7FFF)) + odd) >> np.uint32(16))
    return np.uint16(rounded) if value == value else np.uint16(0x7FC0)


def _wide_float16(bits: Any) -> Any:
    half = np.uint32(np.uint16(bits))
    sign = np.uint32(np.uint32(half & np.uint32(0x8000)) << np.uint32(16))
    magnitude = np.uint32(np.uint32(half & np.uint32(0x7FFF)) << np.uint32(13))
    # The exponents' bias differs by 112; a product with a power of two is exact, for subnormal halves as well.
    scaled = np.float32(magnitude.view(np.float32) * np.float32(2.0**112)).view(np.uint32)
    if magnitude >= np.uint32(0x7C00 << 13):  # infinite, or not a number
        scaled = np.uint32(scaled | np.uint32(0x7F800000))
    return np.uint32(scaled | sign).view(np.float32)


def _narrow_float16(value: Any, like: Any) -> Any:  # noqa: ARG001
    full = np.float32(value).view(np.uint32)
    sign = np.uint32(np.uint32(full >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = np.uint32(full & np.uint32(0x7FFFFFFF))
    odd = np.uint32(np.uint32(magnitude >> np.uint32(13)) & np.uint32(1))
    rebiased = np.uint32(magnitude - np.uint32(112 << 23))
    normal = np.uint32(np.uint32(np.uint32(rebiased + np.uint32(0x0FFF)) + odd) >> np.uint32(13))
    # Where a half is subnormal its unit is 2**-24, which is that of the float32 numbers from 0.5 on.
    low = np.float32(magnitude.view(np.float32) + np.float32(0.5)).view(np.uint32)
    small = np.uint32(low - np.uint32(0x3F000000))
    result = small if magnitude < np.uint32(113 << 23) else normal
    if magnitude >= np.uint32(143 << 23):  # 65,536 and more; what rounds up to it comes out as infinite by itself
        result = np.uint32(0x7C00) if magnitude <= np.uint32(0x7F800000) else np.uint32(0x7E00)
    return np.int16(np.uint16(np.uint32(result | sign)))
