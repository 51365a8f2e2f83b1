# SPDX-License-Identifier: Apache-2.0
"""The gradients of attention in a fixed order, for Hopper GPUs, in Triton.

The usual backward pass (Dao et al. 2022) walks over blocks of keys and adds to the gradient of the queries from many
programs at once, in whatever order they come. Here one program owns a block of keys and walks over queries, another
owns a block of queries and walks over keys: scores are computed twice, seven products instead of five, and nobody adds
to what another has written. `ordered_attention` decides when these are used. Shapes: (batch, heads, places, width).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

PLACES = 128  # of which a length must be a multiple
# width of a head: (queries, keys, warps) in hand for the gradients of keys and values, and for those of queries.
# Measured on an H200; never measured while training, since another block adds in another order.
BLOCKS = {64: ((128, 64, 4), (64, 64, 4)), 128: ((128, 128, 8), (128, 128, 8))}
_STAGES = 2
_DELTA_ROWS = 64


@cache
def _deltas() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def deltas(out, by_out, delta, heads, places, ob, oh, op, gb, gh, gp, D: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
        """What every score's gradient is lessened by: the product of a row of the output with its gradient."""
        head = tl.program_id(1)
        b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
        m, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
        x = tl.load(out + b * ob + h * oh + m[:, None] * op + d[None, :]).to(tl.float32)
        g = tl.load(by_out + b * gb + h * gh + m[:, None] * gp + d[None, :]).to(tl.float32)
        tl.store(delta + head.to(tl.int64) * places + m, tl.sum(x * g, 1))

    return deltas


@cache
def _keys_and_values() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def over_queries(  # type: ignore[no-untyped-def]
        by_k, by_v, k, v, n, q, by_out, total, delta, qp, gp, start, stop, factor,
        MASKED: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    ):  # fmt: skip
        d, rows = tl.arange(0, D), tl.arange(0, M)
        for first in range(start, stop, M):
            m = first + rows
            qt = tl.load(q + m[None, :] * qp + d[:, None])  # (D, M)
            g = tl.load(by_out + m[:, None] * gp + d[None, :])  # (M, D)
            weights = tl.math.exp2(tl.dot(k, qt) * factor - tl.load(total + m)[None, :] * 1.4426950408889634)
            if MASKED:
                weights = tl.where(m[None, :] >= n[:, None], weights, 0.0)
            by_v += tl.dot(weights.to(g.dtype), g)
            by_score = weights * (tl.dot(v, tl.trans(g)) - tl.load(delta + m)[None, :])
            by_k += tl.dot(by_score.to(g.dtype), tl.trans(qt))
        return by_k, by_v

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def keys_and_values(  # type: ignore[no-untyped-def]
        q, k, v, by_out, total, delta, by_k, by_v, heads, places, factor, scale,
        qb, qh, qp, kb, kh, kp, vb, vh, vp, gb, gh, gp, ib, ih, ip, jb, jh, jp,
        CAUSAL: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    ):  # fmt: skip
        first, head = tl.program_id(0) * N, tl.program_id(1)
        b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
        n, d = first + tl.arange(0, N), tl.arange(0, D)
        q, by_out = q + b * qb + h * qh, by_out + b * gb + h * gh
        total, delta = total + head.to(tl.int64) * places, delta + head.to(tl.int64) * places
        keys = tl.load(k + b * kb + h * kh + n[:, None] * kp + d[None, :])
        values = tl.load(v + b * vb + h * vh + n[:, None] * vp + d[None, :])
        sum_k, sum_v = tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32)
        start = 0
        if CAUSAL:  # the blocks that the diagonal goes through, then those below it
            stop = tl.minimum((first + N + M - 1) // M * M, places)
            sum_k, sum_v = over_queries(
                sum_k, sum_v, keys, values, n, q, by_out, total, delta, qp, gp, first // M * M, stop, factor, True, D, M
            )
            start = stop
        sum_k, sum_v = over_queries(
            sum_k, sum_v, keys, values, n, q, by_out, total, delta, qp, gp, start, places, factor, False, D, M
        )
        narrow = by_k.dtype.element_ty
        tl.store(by_k + b * ib + h * ih + n[:, None] * ip + d[None, :], (sum_k * scale).to(narrow))
        tl.store(by_v + b * jb + h * jh + n[:, None] * jp + d[None, :], sum_v.to(narrow))

    return keys_and_values


@cache
def _queries() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def over_keys(  # type: ignore[no-untyped-def]
        by_q, q, g, m, total, delta, k, v, kp, vp, start, stop, factor,
        MASKED: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    ):  # fmt: skip
        d, columns = tl.arange(0, D), tl.arange(0, N)
        for first in range(start, stop, N):
            n = first + columns
            kt = tl.load(k + n[None, :] * kp + d[:, None])  # (D, N)
            vt = tl.load(v + n[None, :] * vp + d[:, None])
            weights = tl.math.exp2(tl.dot(q, kt) * factor - total[:, None])
            if MASKED:
                weights = tl.where(m[:, None] >= n[None, :], weights, 0.0)
            by_score = weights * (tl.dot(g, vt) - delta[:, None])
            by_q += tl.dot(by_score.to(g.dtype), tl.trans(kt))
        return by_q

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def queries(  # type: ignore[no-untyped-def]
        q, k, v, by_out, total, delta, by_q, heads, places, factor, scale,
        qb, qh, qp, kb, kh, kp, vb, vh, vp, gb, gh, gp, ib, ih, ip,
        CAUSAL: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    ):  # fmt: skip
        first, head = (tl.num_programs(0) - 1 - tl.program_id(0)) * M, tl.program_id(1)  # the longest walks begin first
        b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
        m, d = first + tl.arange(0, M), tl.arange(0, D)
        k, v = k + b * kb + h * kh, v + b * vb + h * vh
        rows = tl.load(q + b * qb + h * qh + m[:, None] * qp + d[None, :])
        g = tl.load(by_out + b * gb + h * gh + m[:, None] * gp + d[None, :])
        sums = tl.load(total + head.to(tl.int64) * places + m) * 1.4426950408889634
        less = tl.load(delta + head.to(tl.int64) * places + m)
        sum_q = tl.zeros([M, D], tl.float32)
        below = first // N * N if CAUSAL else places
        sum_q = over_keys(sum_q, rows, g, m, sums, less, k, v, kp, vp, 0, below, factor, False, D, N)
        if CAUSAL:
            sum_q = over_keys(sum_q, rows, g, m, sums, less, k, v, kp, vp, below, first + M, factor, True, D, N)
        tl.store(by_q + b * ib + h * ih + m[:, None] * ip + d[None, :], (sum_q * scale).to(by_q.dtype.element_ty))

    return queries


def gradients(
    by_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries, keys and values, each laid out as what it belongs to. `total`: the logarithm of the sum of
    exponentials of each row of scores, (batch, heads, places), float32 and contiguous."""
    batch, heads, places, width = q.shape
    by_q, by_k, by_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta = torch.empty_like(total)
    factor = scale * 1.4426950408889634  # powers of two instead of e

    def strides(*tensors: Tensor) -> list[int]:
        return [stride for tensor in tensors for stride in tensor.stride()[:3]]

    _deltas()[(places // _DELTA_ROWS, batch * heads)](
        out, by_out, delta, heads, places, *strides(out, by_out), D=width, ROWS=_DELTA_ROWS
    )
    read = (q, k, v, by_out, total, delta)
    sizes = (heads, places, factor, scale)
    (m, n, warps), (m2, n2, warps2) = BLOCKS[width]
    _keys_and_values()[(places // n, batch * heads)](
        *read, by_k, by_v, *sizes, *strides(q, k, v, by_out, by_k, by_v),
        CAUSAL=causal, D=width, M=m, N=n, num_warps=warps, num_stages=_STAGES,
    )  # fmt: skip
    _queries()[(places // m2, batch * heads)](
        *read, by_q, *sizes, *strides(q, k, v, by_out, by_q),
        CAUSAL=causal, D=width, M=m2, N=n2, num_warps=warps2, num_stages=_STAGES,
    )  # fmt: skip
    return by_q, by_k, by_v
