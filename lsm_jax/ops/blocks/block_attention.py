"""Block-sparse attention: softmax attention to the blocks of earlier tokens that a query selects (MoBA, arXiv 2502.13189,
and NSA, arXiv 2502.11089).

In MoBA, a document's tokens are cut into blocks of `block_size`. A query attends to the tokens of its own block up to itself, and to
all tokens of the `num_blocks` - 1 earlier blocks with the largest q · mean(k); the softmax is over their union. The selection
has no gradient.

flash-linear-attention attends to all tokens when it decodes; here a token is computed in the same way in decoding as in
training.
"""

from __future__ import annotations

import functools

from jaxtyping import Array, Float, Int

from lsm_jax.ops.attention.entrance import axes_of, check_form, check_tokens, state_or_empty
from lsm_jax.ops.attention.shared_rows import run_in_shared_row
from lsm_jax.ops.attention.state import AttentionState, attention_state
from lsm_jax.ops.backends.run import run, static_of
from lsm_jax.ops.blocks.selected import tile_size
from lsm_jax.ops.blocks.xla import Options
from lsm_jax.ops.core import checks
from lsm_jax.parallel import over_mesh, sequence_shards


def block_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T G V"],
    *,
    block_size: int = 256,
    num_blocks: int = 4,
    scale: float | None = None,
    initial_state: AttentionState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
    form: str = "chunk",
    implementation: str | tuple[str, ...] | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T max(H,G) V"], AttentionState]:
    """Attend to the tokens of the own block and of the best earlier blocks of the document.

    Args:
        q: [B, T, H, K] queries; H is a multiple (grouped-query attention) or a divisor of G.
        k: [B, T, Hk, K] keys; Hk divides G.
        v: [B, T, G, V] values.
        block_size: tokens in a block, counted from the document's start; only written tokens count.
        num_blocks: the number of blocks of a query, its own among them.
        scale: multiplies the scores of the softmax; None is `K ** -0.5`.
        initial_state: the keys and values to continue from; with keys [B, S, ...] there is one state per
            segment: the tokens of id s use state s - 1. None is an empty state, with a capacity of T tokens.
        segment_ids: [B, T] integers, 0 for padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 for tokens whose key and value are not written: they attend to the tokens before them.
        form: "recurrent" (token by token) or "chunk" (many queries together). Single tokens are always computed by the first.
            Of a row of at least 1.5 `num_blocks * block_size` tokens without an initial state, the second computes the scores
            of the own and the selected blocks alone, so that work grows with T `num_blocks` `block_size`, besides the products
            of queries and means, T / `block_size` for each query, of which at most 2^27 are computed at a time. It has
            reverse-mode derivatives only in such rows: `jax.jvp` raises an error. Of other rows it computes all scores, for a
            chunk of queries after another, and masks those of blocks that are not selected. Results differ by rounding alone.
        implementation: None or "xla"; there is no fused kernel.
        chunk_size: queries that are computed together, a power of two: in a chunk, or in a tile that attends to one block. None
            is 64 for a chunk, and for a tile at most 128, so few that padding adds at most a quarter. Larger tiles cost more
            work and memory: each block's last tile is padded.

    Returns:
        The output in v's dtype, 0 for tokens that attend to no token and NaN for tokens beyond the state's capacity, and
        the final state. On a mesh whose devices share rows, every device receives all keys and values, and computes its own
        tokens' outputs.

    Raises:
        ValueError: a shape, number of heads or blocks, form, implementation or chunk size is not accepted.
    """
    return _run(
        "block_attention", q, k, v, None, block_size=block_size, num_blocks=num_blocks, window=None,
        scale=scale, initial_state=initial_state, segment_ids=segment_ids, update_mask=update_mask,
        form=form, implementation=implementation, chunk_size=chunk_size,
    )  # fmt: skip


def native_sparse_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T G V"],
    gates: Float[Array, "B T max(H,G) 3"],
    *,
    block_size: int = 64,
    num_blocks: int = 16,
    window: int = 512,
    scale: float | None = None,
    initial_state: AttentionState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
    form: str = "chunk",
    implementation: str | tuple[str, ...] | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T max(H,G) V"], AttentionState]:
    """Add attention to means of blocks, to the tokens of selected blocks and to a window, each with a gate of its own (NSA,
    arXiv 2502.11089).

    A block's means of keys and values are attended to once the block is complete. The weights of this attention, averaged
    over the query heads of a memory, select its blocks; the document's first block and the query's own and previous blocks
    are always selected, whatever the weights of others are. The selection has no gradient.

    Args:
        q, k, v, scale, initial_state, segment_ids, update_mask, implementation: as in `block_attention`.
        gates: [B, T, max(H, G), 3], the weights of the means, of the selected blocks and of the window.
        block_size: tokens in a block.
        num_blocks: the number of selected blocks, at least 3.
        window: each token attends to the last `window` written tokens, itself included.
        form: "recurrent" (token by token) or "chunk" (many queries together). Single tokens are always computed by the first.
            Of a row of at least 1.5 `num_blocks * block_size` tokens without an initial state, the second computes the scores of
            the selected blocks and of the window alone, so that work grows with T (`num_blocks` `block_size` + `window`), besides
            the scores of means, T / `block_size` for each query. It has reverse-mode derivatives only in such rows: `jax.jvp`
            raises an error. Of other rows it computes all scores, for a chunk of queries after another, and masks those of blocks
            that are not selected. Results differ by rounding alone.
        chunk_size: queries of each head that are computed together, a power of two: in a chunk, or in a tile that attends to one
            selected block. None is 64 for a chunk, and for a tile so few that all heads of a memory have at most 512 queries and
            padding adds at most a quarter.

    Returns:
        The output and the final state, as `block_attention` does.

    Raises:
        ValueError: a shape, number of heads or blocks, window, form, implementation or chunk size is not accepted.
    """
    op = "native_sparse_attention"
    for name, value, least in (("window", window, 1), ("num_blocks", num_blocks, 3)):
        if not checks.is_count(value) or value < least:
            raise ValueError(f"{op}: {name}={value!r}; accepted are integers from {least}")
    return _run(
        op, q, k, v, gates, block_size=block_size, num_blocks=num_blocks, window=int(window),
        scale=scale, initial_state=initial_state, segment_ids=segment_ids, update_mask=update_mask,
        form=form, implementation=implementation, chunk_size=chunk_size,
    )  # fmt: skip


def _run(
    op: str, q, k, v, gates, *, block_size, num_blocks, window, scale, initial_state, segment_ids,
    update_mask, form, implementation, chunk_size,
):  # fmt: skip
    """Check the arguments of `block_attention` or `native_sparse_attention`, and compute it."""
    check_form(op, form)
    batch, length, _, _, heads, key_dim, value_dim = check_tokens(
        op, q, k, v,
        implementation=implementation, segment_ids=segment_ids, update_mask=update_mask,
    )  # fmt: skip
    for name, value in (("block_size", block_size), ("num_blocks", num_blocks)):
        if not checks.is_count(value):
            raise ValueError(f"{op}: {name}={value!r}; accepted are integers from 1")
    if gates is not None:
        shape = (batch, length, max(q.shape[2], heads), 3)
        checks.check_shape(op, "gates", gates, shape, "B, T, H, 3")
    size = checks.check_chunk_size(op, chunk_size, -(-length // sequence_shards(length)))
    tile = None
    block_size, num_blocks = int(block_size), int(num_blocks)
    # In a row of `num_blocks` blocks every query attends to all of its document, and in one that is little longer to most of
    # it, so that padding of tiles would cost more than it saves.
    if initial_state is None and 2 * length >= 3 * num_blocks * block_size:
        group = max(1, q.shape[2] // heads)
        of_tile = (group, 1) if gates is None else (1, group)
        tile = size if chunk_size else tile_size(block_size, num_blocks - 1, *of_tile)
    empty = functools.partial(
        attention_state, batch, num_kv_heads=heads, key_dim=key_dim, value_dim=value_dim,
        dtype=k.dtype,
    )  # fmt: skip
    state = state_or_empty(op, initial_state, empty, length, segment_ids)
    options = Options(
        block_size=block_size,
        num_blocks=num_blocks,
        window=window,
        scale=checks.scale_or_default(op, scale, key_dim),
        by_token=form == "recurrent" or length == 1,
        size=size,
        tile=tile,
        no_state=initial_state is None,
        dtype=checks.compute_dtype(q, k, v, gates),
        precision=checks.matmul_precision(q, k, v),
    )
    batched = dict(
        q=q, k=k, v=v, gates=gates, state=state, segment_ids=segment_ids, update_mask=update_mask
    )
    return over_mesh(
        run, batched, {}, static_of(op, options, implementation), **axes_of(batched), in_sequence=run_in_shared_row
    )  # fmt: skip
