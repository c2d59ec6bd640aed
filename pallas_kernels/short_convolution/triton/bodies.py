"""Kernels of short convolutions in Triton: the same source for every NVIDIA card of compute capability 8.0 or more.

This module imports only Triton, so that its kernels can also run in Triton's interpreter and be compiled without a GPU. With z_t = Σ_d
weight[W - 1 - d] x_{t-d} + bias over the tokens of t's document and s = silu(z) or z, the output is y = s, or s / sqrt(Σ s² + ε) over a head.

Common to both kernels:

- x, y, dy and dx are [B, T, D], weight [W, D], bias [D] and tail [B, W - 1, D], the tokens before the first, oldest first.
- With `DOCUMENTS`, tokens are counted in an order in which padding comes last: `order` [B, T] has the index in x of each token, and `run` [B, T]
  the number of its document, -1 for padding. The tail is of document 0.
- A program computes tiles of BT tokens and BD channels. With `NORMALIZE` these are one head.
- An array that a kernel does not use is any other pointer.
"""

import triton
import triton.language as tl

EPSILON: tl.constexpr = tl.constexpr(1e-6)


@triton.jit
def _positions(order, t, T, DOCUMENTS: tl.constexpr):
    """Return the indices in x of tokens t [BT] of a row, and whether they are in the row."""
    inside = (t >= 0) & (t < T)
    if DOCUMENTS:
        at = tl.load(order + t, mask=inside, other=0)
    else:
        at = t
    return at, inside


@triton.jit
def _load_tokens(x, tail, order, t, channels, T, D: tl.constexpr, W: tl.constexpr, DOCUMENTS: tl.constexpr):  # fmt: skip
    """Return tokens t [BT] of a row, from x or from the tail, as [BT, BD] float32; 0 outside of both."""
    at, inside = _positions(order, t, T, DOCUMENTS)
    value = tl.load(x + at[:, None] * D + channels[None, :], mask=inside[:, None], other=0.0)
    early = (t < 0) & (t > -W)
    old = tl.load(
        tail + (t + W - 1)[:, None] * D + channels[None, :], mask=early[:, None], other=0.0
    )
    return value.to(tl.float32) + old.to(tl.float32)


@triton.jit
def _load_documents(run, t, T):
    """Return the numbers of the documents of tokens t [BT]: 0 before the row, and -1 after it."""
    number = tl.load(run + t, mask=(t >= 0) & (t < T), other=-1)
    return tl.where(t < 0, 0, number)


@triton.jit
def convolution_forward(
    x, weight, bias, tail, order, run, T, y,
    D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BIAS: tl.constexpr,
    SILU: tl.constexpr, NORMALIZE: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Store the output y of one tile."""
    columns: tl.constexpr = D // BD
    column, at = tl.program_id(0) % columns, tl.program_id(0) // columns
    blocks = tl.cdiv(T, BT)
    t = at % blocks * BT + tl.arange(0, BT)
    row = (at // blocks).to(tl.int64)
    channels = column * BD + tl.arange(0, BD)
    x += row * T * D
    y += row * T * D
    tail += row * (W - 1) * D
    order += row * T
    run += row * T
    z = tl.zeros([BT, BD], tl.float32)
    if DOCUMENTS:
        document = _load_documents(run, t, T)
    for d in tl.static_range(W):
        tap = _load_tokens(x, tail, order, t - d, channels, T, D, W, DOCUMENTS)
        if DOCUMENTS:
            if d > 0:
                tap = tl.where((_load_documents(run, t - d, T) == document)[:, None], tap, 0.0)
        z += tap * tl.load(weight + (W - 1 - d) * D + channels).to(tl.float32)[None, :]
    if BIAS:
        z += tl.load(bias + channels).to(tl.float32)[None, :]
    if SILU:
        z = z * tl.sigmoid(z)
    if NORMALIZE:
        z = z * tl.rsqrt(tl.sum(z * z, 1) + EPSILON)[:, None]
    if DOCUMENTS:
        z = tl.where((document >= 0)[:, None], z, 0.0)
    position, inside = _positions(order, t, T, DOCUMENTS)
    to = y + position[:, None] * D + channels[None, :]
    tl.store(to, z.to(y.dtype.element_ty), mask=inside[:, None])


@triton.jit
def convolution_backward(
    x, weight, bias, tail, order, run, dy, T, dx, d_weight, d_tail,
    D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, REPEAT: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, NORMALIZE: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Store the gradients of x and of the tail, and those of the weight and of the bias from this program's tokens, `d_weight` [B, blocks, W + 1, D].

    A program computes REPEAT tiles. Tokens are counted from the tail's first, -(W - 1). The gradient of x_t is Σ_d weight[W - 1 - d] dz_{t+d}
    over the tokens of its document, for which z is computed anew.
    """
    columns: tl.constexpr = D // BD
    column, at = tl.program_id(0) % columns, tl.program_id(0) // columns
    blocks = tl.cdiv(T + W - 1, BT * REPEAT)
    block, row = at % blocks, (at // blocks).to(tl.int64)
    channels = column * BD + tl.arange(0, BD)
    x += row * T * D
    dy += row * T * D
    dx += row * T * D
    tail += row * (W - 1) * D
    d_tail += row * (W - 1) * D
    order += row * T
    run += row * T
    d_weight += (row * blocks + block) * (W + 1) * D
    weights = ()
    sums = ()
    for d in tl.static_range(W):
        weights = weights + (tl.load(weight + (W - 1 - d) * D + channels).to(tl.float32)[None, :],)
        sums = sums + (tl.zeros([BT, BD], tl.float32),)
    d_bias = tl.zeros([BT, BD], tl.float32)
    for tile in range(REPEAT):
        t = (block * REPEAT + tile) * BT + tl.arange(0, BT) - (W - 1)
        # The tokens from t - (W - 1) to t + (W - 1), and their documents.
        tokens = ()
        documents = ()
        for m in tl.static_range(2 * W - 1):
            near = t + (m - (W - 1))
            tokens = tokens + (_load_tokens(x, tail, order, near, channels, T, D, W, DOCUMENTS),)
            if DOCUMENTS:
                documents = documents + (_load_documents(run, near, T),)
        gradient = tl.zeros([BT, BD], tl.float32)
        for d in tl.static_range(W):
            z = tl.zeros([BT, BD], tl.float32)
            for e in tl.static_range(W):
                tap = tokens[W - 1 + d - e]
                if DOCUMENTS:
                    tap = tl.where((documents[W - 1 + d - e] == documents[W - 1 + d])[:, None], tap, 0.0)  # fmt: skip
                z += tap * weights[e]
            if BIAS:
                z += tl.load(bias + channels).to(tl.float32)[None, :]
            position, inside = _positions(order, t + d, T, DOCUMENTS)
            if DOCUMENTS:
                inside = inside & (documents[W - 1 + d] >= 0)
            dz = tl.load(dy + position[:, None] * D + channels[None, :], mask=inside[:, None], other=0.0)  # fmt: skip
            dz = dz.to(tl.float32)
            if SILU:
                gate = tl.sigmoid(z)
                value = z * gate
            else:
                value = z
            if NORMALIZE:
                norm = tl.rsqrt(tl.sum(value * value, 1) + EPSILON)[:, None]
                dz = norm * (dz - value * (norm * norm * tl.sum(dz * value, 1)[:, None]))
            if SILU:
                dz = dz * (gate * (1.0 + z * (1.0 - gate)))
            if d == 0:
                added = ()
                for e in tl.static_range(W):
                    tap = tokens[W - 1 - e]
                    if DOCUMENTS:
                        tap = tl.where((documents[W - 1 - e] == documents[W - 1])[:, None], tap, 0.0)  # fmt: skip
                    added = added + (sums[e] + dz * tap,)
                sums = added
                d_bias += dz
            if DOCUMENTS:
                dz = tl.where((documents[W - 1] == documents[W - 1 + d])[:, None], dz, 0.0)
            gradient += weights[d] * dz
        position, inside = _positions(order, t, T, DOCUMENTS)
        to = dx + position[:, None] * D + channels[None, :]
        tl.store(to, gradient.to(dx.dtype.element_ty), mask=inside[:, None])
        to = d_tail + (t + W - 1)[:, None] * D + channels[None, :]
        tl.store(to, gradient.to(d_tail.dtype.element_ty), mask=(t < 0)[:, None])
    for d in tl.static_range(W):
        tl.store(d_weight + (W - 1 - d) * D + channels, tl.sum(sums[d], 0))
    tl.store(d_weight + W * D + channels, tl.sum(d_bias, 0))
