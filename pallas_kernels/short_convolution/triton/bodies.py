"""Kernels of short convolutions in Triton: the same source for every NVIDIA card of compute capability 8.0 or more.

This module imports only Triton, so that its kernels can also run in Triton's interpreter and be compiled without a GPU. With z_t = Σ_d
weight[W - 1 - d] x_{t-d} + bias over the tokens of t's document and s = silu(z) or z, the output is y = s, or s / sqrt(Σ s² + ε) over a head.

Common to both kernels:

- x, y, dy and dx are [B, T, D], weight [W, D], bias [D] and tail [B, W - 1, D], the tokens before the first, oldest first.
- With `DOCUMENTS`, tokens are counted in an order in which padding comes last: `order` [B, T] has the index in x of each token, and `run` [B, T]
  the number of its document, -1 for padding. The tail is of document 0.
- A program walks over BLOCK tokens of HEADS · DIM channels, and keeps the last W - 1 tokens in registers, so that it loads each token once. With
  `NORMALIZE` DIM is the number of channels of a head. It takes UNROLL tokens at a time, and loads the next ones before it computes with
  them.
- An array that a kernel does not use is any other pointer.
"""

import triton
import triton.language as tl

EPSILON: tl.constexpr = tl.constexpr(1e-6)
_PTX: tl.constexpr = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has no PTX


@triton.jit
def _sigmoid(z):
    """Return 1 / (1 + exp(-z)) in float32.

    `tl.sigmoid` compiles to 12 instructions, most of which treat subnormal exponentials and quotients; in these 4 they are 0.
    """
    if _PTX:
        gate = tl.inline_asm_elementwise(
            "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }",
            "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        gate = tl.sigmoid(z)
    return gate


@triton.jit
def _place(order, run, t, end, DOCUMENTS: tl.constexpr):
    """Return the index in x of token t of a row, the number of its document, and whether it is a token before `end`, not padding.

    The number is 0 before the row, and -1 from `end` on and for padding.
    """
    inside = (t >= 0) & (t < end)
    if DOCUMENTS:
        at = tl.load(order + t, mask=inside, other=0)
        document = tl.load(run + t, mask=inside, other=-1)
        document = tl.where(t < 0, 0, document)
        inside = inside & (document >= 0)
    else:
        at = t
        document = t * 0
    return at.to(tl.int64), document, inside


@triton.jit
def _load_tokens(
    x, tail, dy, order, run, first, end, channels, COUNT: tl.constexpr, D: tl.constexpr, W: tl.constexpr, DOCUMENTS: tl.constexpr, GRADIENTS: tl.constexpr,
):  # fmt: skip
    """Return COUNT tokens of a row from token `first` on, from x or from the tail; the numbers of their documents; and with `GRADIENTS` the
    gradients of their outputs. Tokens and gradients are 0 outside of both arrays, of padding and from `end` on.
    """
    places = ()
    conditions = ()
    documents = ()
    for m in tl.static_range(COUNT):
        at, document, inside = _place(order, run, first + m, end, DOCUMENTS)
        places = places + (at,)
        conditions = conditions + (inside,)
        documents = documents + (document,)
    values = ()
    gradients = ()
    for m in tl.static_range(COUNT):
        t = first + m
        early = (t < 0) & (t > -W)
        source = tl.where(early, tail + (t + (W - 1)) * D, x + places[m] * D)
        values = values + (tl.load(source + channels, mask=conditions[m] | early, other=0.0),)
        if GRADIENTS:
            gradient = tl.load(dy + places[m] * D + channels, mask=conditions[m], other=0.0)
            gradients = gradients + (gradient,)
    if GRADIENTS:
        return values, documents, gradients
    else:
        return values, documents, values


@triton.jit
def _convolve(tokens, documents, weights, offset, m: tl.constexpr, W: tl.constexpr, DOCUMENTS: tl.constexpr):  # fmt: skip
    """Return z of the token at index m + W - 1 of `tokens`, which are in order."""
    z = offset + tokens[m + W - 1].to(tl.float32) * weights[0]
    for d in tl.static_range(1, W):
        tap = tokens[m + W - 1 - d].to(tl.float32)
        if DOCUMENTS:
            tap = tl.where(documents[m + W - 1 - d] == documents[m + W - 1], tap, 0.0)
        z += tap * weights[d]
    return z


@triton.jit
def _gradient_of_z(z, dy, SILU: tl.constexpr, NORMALIZE: tl.constexpr):
    """Return the gradient of one token's z from that of its output."""
    dz = dy.to(tl.float32)
    value = z
    if SILU:
        gate = _sigmoid(z)
        value = z * gate
    if NORMALIZE:
        norm = tl.rsqrt(tl.sum(value * value, 1) + EPSILON)[:, None]
        dz = norm * (dz - value * (norm * norm * tl.sum(dz * value, 1)[:, None]))
    if SILU:
        dz = dz * (gate + value * (1.0 - gate))
    return dz


@triton.jit
def _load_weights(weight, bias, channels, D: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr):
    """Return the weights [HEADS, DIM] of the last W tokens, newest first, and the bias."""
    weights = ()
    for d in tl.static_range(W):
        weights = weights + (tl.load(weight + (W - 1 - d) * D + channels).to(tl.float32),)
    offset = tl.zeros(channels.shape, tl.float32)
    if BIAS:
        offset = tl.load(bias + channels).to(tl.float32)
    return weights, offset


@triton.jit
def convolution_forward(
    x, weight, bias, tail, order, run, T, y,
    D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, UNROLL: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, NORMALIZE: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Store the output y of one block of tokens."""
    columns: tl.constexpr = D // (HEADS * DIM)
    column, at = tl.program_id(0) % columns, tl.program_id(0) // columns
    blocks = tl.cdiv(T, BLOCK)
    start = at % blocks * BLOCK
    end = tl.minimum(T, start + BLOCK)
    row = (at // blocks).to(tl.int64)
    channels = (column * HEADS + tl.arange(0, HEADS))[:, None] * DIM + tl.arange(0, DIM)[None, :]
    x += row * T * D
    y += row * T * D
    tail += row * (W - 1) * D
    order += row * T
    run += row * T
    weights, offset = _load_weights(weight, bias, channels, D, W, BIAS)
    before, documents, _ = _load_tokens(x, tail, y, order, run, start - (W - 1), end, channels, W - 1, D, W, DOCUMENTS, False)  # fmt: skip
    tokens = ()
    for m in tl.static_range(W - 1):
        tokens = tokens + (before[m].to(tl.float32),)
    ahead, ahead_documents, _ = _load_tokens(x, tail, y, order, run, start, end, channels, UNROLL, D, W, DOCUMENTS, False)  # fmt: skip
    for step in range(0, tl.minimum(BLOCK, T - start), UNROLL):
        first = start + step
        near = tokens
        near_documents = documents
        for m in tl.static_range(UNROLL):
            near = near + (ahead[m].to(tl.float32),)
            near_documents = near_documents + (ahead_documents[m],)
        ahead, ahead_documents, _ = _load_tokens(x, tail, y, order, run, first + UNROLL, end, channels, UNROLL, D, W, DOCUMENTS, False)  # fmt: skip
        for m in tl.static_range(UNROLL):
            z = _convolve(near, near_documents, weights, offset, m, W, DOCUMENTS)
            if SILU:
                z = z * _sigmoid(z)
            if NORMALIZE:
                z = z * tl.rsqrt(tl.sum(z * z, 1) + EPSILON)[:, None]
            position = first + m
            if DOCUMENTS:
                z = tl.where(near_documents[W - 1 + m] >= 0, z, 0.0)
                position = tl.load(order + first + m, mask=first + m < end, other=0)
            to = y + position.to(tl.int64) * D + channels
            tl.store(to, z.to(y.dtype.element_ty), mask=first + m < end)
        tokens = ()
        documents = ()
        for m in tl.static_range(W - 1):
            tokens = tokens + (near[UNROLL + m],)
            documents = documents + (near_documents[UNROLL + m],)


@triton.jit
def convolution_backward(
    x, weight, bias, tail, order, run, dy, T, dx, d_weight, d_tail,
    D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, UNROLL: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, NORMALIZE: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Store the gradients of x and of the tail, and those of the weight and of the bias from this program's tokens, `d_weight` [B, blocks, W + 1, D].

    Tokens are counted from the tail's first, -(W - 1). The gradient of x_t is Σ_d weight[W - 1 - d] dz_{t+d} over the tokens of its document, and
    that of weight[W - 1 - d] is Σ_t dz_{t+d} x_t over the same pairs. So a program computes dz also of the W - 1 tokens after its block.
    """
    columns: tl.constexpr = D // (HEADS * DIM)
    column, at = tl.program_id(0) % columns, tl.program_id(0) // columns
    blocks = tl.cdiv(T + W - 1, BLOCK)
    block, row = at % blocks, (at // blocks).to(tl.int64)
    start = block * BLOCK - (W - 1)
    end = tl.minimum(T, start + BLOCK + (W - 1))
    channels = (column * HEADS + tl.arange(0, HEADS))[:, None] * DIM + tl.arange(0, DIM)[None, :]
    x += row * T * D
    dy += row * T * D
    dx += row * T * D
    tail += row * (W - 1) * D
    d_tail += row * (W - 1) * D
    order += row * T
    run += row * T
    d_weight += (row * blocks + block) * (W + 1) * D
    weights, offset = _load_weights(weight, bias, channels, D, W, BIAS)
    sums = ()
    for _ in tl.static_range(W + 1):
        sums = sums + (tl.zeros(channels.shape, tl.float32),)
    # The W - 1 tokens before the block, its first W - 1 tokens, and the gradients of z of the latter.
    before, documents, _ = _load_tokens(x, tail, dy, order, run, start - (W - 1), end, channels, W - 1, D, W, DOCUMENTS, False)  # fmt: skip
    here, last_documents, given = _load_tokens(x, tail, dy, order, run, start, end, channels, W - 1, D, W, DOCUMENTS, True)  # fmt: skip
    ahead, ahead_documents, ahead_gradients = _load_tokens(x, tail, dy, order, run, start + (W - 1), end, channels, UNROLL, D, W, DOCUMENTS, True)  # fmt: skip
    tokens = ()
    last = ()
    for m in tl.static_range(W - 1):
        tokens = tokens + (before[m].to(tl.float32),)
        last = last + (here[m].to(tl.float32),)
    tokens = tokens + last
    documents = documents + last_documents
    gradients = ()
    for m in tl.static_range(W - 1):
        z = _convolve(tokens, documents, weights, offset, m, W, DOCUMENTS)
        gradients = gradients + (_gradient_of_z(z, given[m], SILU, NORMALIZE),)
    for step in range(0, tl.minimum(BLOCK, T - start), UNROLL):
        first = start + step
        near = last
        near_documents = last_documents
        for m in tl.static_range(UNROLL):
            near = near + (ahead[m].to(tl.float32),)
            near_documents = near_documents + (ahead_documents[m],)
        near_gradients = ahead_gradients
        ahead, ahead_documents, ahead_gradients = _load_tokens(x, tail, dy, order, run, first + (UNROLL + W - 1), end, channels, UNROLL, D, W, DOCUMENTS, True)  # fmt: skip
        for m in tl.static_range(UNROLL):
            t = first + m
            z = _convolve(near, near_documents, weights, offset, m, W, DOCUMENTS)
            gradients = gradients + (_gradient_of_z(z, near_gradients[m], SILU, NORMALIZE),)
            gradient = tl.zeros(channels.shape, tl.float32)
            added = ()
            for d in tl.static_range(W):
                dz = gradients[m + d]
                if DOCUMENTS:
                    if d > 0:
                        dz = tl.where(near_documents[m] == near_documents[m + d], dz, 0.0)
                gradient += weights[d] * dz
                added = added + (sums[d] + near[m] * dz,)
            sums = added + (sums[W] + gradients[m],)
            position = t
            if DOCUMENTS:
                position = tl.load(order + t, mask=(t >= 0) & (t < T), other=0)
            to = tl.where(t < 0, d_tail + (t + (W - 1)) * D, dx + position.to(tl.int64) * D)
            tl.store(to + channels, gradient.to(dx.dtype.element_ty), mask=t < T)
        last = ()
        last_documents = ()
        kept = ()
        for m in tl.static_range(W - 1):
            last = last + (near[UNROLL + m],)
            last_documents = last_documents + (near_documents[UNROLL + m],)
            kept = kept + (gradients[UNROLL + m],)
        gradients = kept
    for d in tl.static_range(W):
        tl.store(d_weight + (W - 1 - d) * D + channels, sums[d])
    tl.store(d_weight + W * D + channels, sums[W])
