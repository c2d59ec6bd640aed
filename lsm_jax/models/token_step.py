"""One token of each row through a decoder's layers by few kernels, as in generation on Hopper.

The time of one row's step is that of its launches: XLA computes a layer of gated linear attention by 15 kernels, here it has five. A product
reads its matrix once, with the norm in front of it and the gate or the residual sum behind it in the same kernel
(`pallas_kernels.row_product`); the memory is decayed, written and read by another (`pallas_kernels.decode_step`), which also computes the
decay from its gate. Of more rows the products are XLA's, one for all that reads the layer's norm, whose result the kernel of the memory reads
where it is. Of many rows they are computed by tiles, again five kernels a layer (`lsm_jax.models.token_tiles`), and the memories, most of a
token's bytes there, are written once in a group of tokens. Values are those of the layers but for the
order of sums and, of many rows, what is rounded: norms' scales with the matrices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lsm_jax import mixers
from lsm_jax.feedforward.swiglu import SwiGLU
from lsm_jax.mixers.gla import GLA
from lsm_jax.mixers.joined import is_plain
from lsm_jax.mixers.layers import Dense, RMSNorm, project, split_heads
from lsm_jax.mixers.normed_product import normed_product
from lsm_jax.mixers.tails import Pointwise
from lsm_jax.models import token_tiles
from lsm_jax.models.decoder import Decoder, DecoderState, PeriodStates
from lsm_jax.models.loss import capped
from lsm_jax.models.token_tiles import Stream
from lsm_jax.ops.backends.token_kernels import decode_steps, row_products
from lsm_jax.ops.core.platforms import compute_capabilities

MOST_ROWS = 4
"""The largest number of rows whose products are computed by `row_product`; those of more rows run on the tensor cores."""
MANY_ROWS = 256
"""The largest number of rows that pass through mixers with steps of their own."""
WRITING_ROWS = 64
"""The same where each token writes the memories: on an H200 64 rows of GLA 340M are then 1.06 times as fast as by layers, 256 rows equally fast."""
GROUP = 8
"""The number of tokens of which one writes the memories of many rows (`pallas_kernels.decode_step.deferred`); 1: each. On an H200
256 rows of GLA 340M have 126,988 tokens/s with 8 and 117,423 with 4 in one run, and had 79,142 with 1 by earlier kernels."""
DEFERRED_ROWS = 128
"""The least number of rows of which so few tokens write: 128 and 256 were measured."""
DEFERRED_KEYS = (128,)
"""The key channels of a head with which so few tokens write; the kernel has 256, too, with which nobody has timed a model."""
OTHER_MIXERS = False
"""Whether models whose mixers have no step of their own pass their feedforwards and heads by these kernels, which gained nothing for Gated DeltaNet."""
_INTERPRET: Any = False  # parameters of Mosaic GPU's interpreter, in tests


class _Matrices(NamedTuple):
    """The matrices [F, I] of one layer, transposed and side by side where one product computes several results.

    Attributes:
        into: matrix of the mixer's input, or None for a mixer without kernels of its own.
        out: matrix of the mixer's output, or None.
        gate_up: matrix of the feedforward's input, or None where XLA multiplies.
        down: matrix of the feedforward's output, or None.
    """

    into: Any
    out: Any
    gate_up: Any
    down: Any


class Pending(NamedTuple):
    """The writes that the memories of a model's layers do not hold yet, of the tokens since the last one that wrote.

    Attributes:
        count: int32 scalar, the number of these tokens.
        layers: the writes of each period's layers (`pallas_kernels.decode_step.Pending`).
    """

    count: jax.Array
    layers: tuple[tuple[Any, ...], ...]


class Prepared(NamedTuple):
    """Arrays that the kernels read instead of a model's parameters: the matrices of each period's layers, and the head [V, D], or None for
    many rows.
    """

    layers: tuple[tuple[_Matrices, ...], ...]
    head: Any


def runs_on(devices: Iterable[jax.Device]) -> bool:
    """Return whether the kernels can run on these devices, which hold a model's parameters: GPUs."""
    return bool(_INTERPRET) or all(device.platform == "gpu" for device in devices)


def serves(model: Decoder, batch: int) -> bool:
    """Return whether one token of `batch` rows passes through the model's layers by these kernels: on Hopper, in bfloat16, where all layers
    have root-mean-square norms in front, plain SwiGLU feedforwards and mixers with a step of their own (`OTHER_MIXERS`); for up to `MOST_ROWS` rows
    of sizes that `row_product` supports, and for up to `MANY_ROWS`, or `WRITING_ROWS` where each token writes the memories.
    """
    if jnp.dtype(model.dtype) != jnp.bfloat16:
        return False
    if compute_capabilities() != {"9.0"} and not _INTERPRET:
        return False
    if not all(map(_is_served, model.periods.blocks)):
        return False
    own_steps = all(_is_served_gla(block.mixer, batch) for block in model.periods.blocks)
    if batch > MOST_ROWS:
        return own_steps and batch <= (MANY_ROWS if group_of(model, batch) > 1 else WRITING_ROWS)
    if not (own_steps or OTHER_MIXERS):
        return False
    if not (type(model.norm) is RMSNorm and model.head_bias is None):
        return False
    if model.lm_head is not None and not is_plain(model.lm_head):
        return False
    vocabulary, width = model.embedding.get_value().shape
    x = _shape(batch, width)
    products: list[Any] = [(x, _shape(vocabulary, width), None, ())]
    for block in model.periods.blocks:
        feedforward: Any = block.feedforward
        inner = feedforward.config.width(width)
        products.append((x, _shape(2 * inner, width), None, (inner, inner)))
        products.append((_shape(batch, inner), _shape(width, inner), None, ()))
    unsupported = row_products().unsupported
    return all(unsupported(*product) is None for product in products)


def _shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def _is_served(block: Any) -> bool:
    """Return whether a layer has a plain SwiGLU feedforward, and norms and sums that the kernels compute."""
    ff = block.feedforward
    if type(ff) is not SwiGLU or ff.gate_up is not None:
        return False
    plain = all(map(is_plain, (ff.gate_proj, ff.up_proj, ff.down_proj)))
    unscaled = ff.config.gate_scale == ff.config.output_scale == block.residual_scale == 1
    normed = type(block.mixer_norm) is RMSNorm and type(block.feedforward_norm) is RMSNorm
    return plain and unscaled and normed and not (block.post_norm or block.in_fp8 or block.adapted)


def _gla_projections(mixer: GLA) -> tuple[Dense, ...]:
    return mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.g_proj, mixer.decay_down


def _is_served_gla(mixer: Any, batch: int) -> bool:
    """Return whether a mixer is gated linear attention whose token the kernels compute."""
    if type(mixer) is not GLA or not isinstance(mixer.q_conv, Pointwise):
        return False
    config, op = mixer.config, mixer.config.op
    dense = *_gla_projections(mixer), mixer.o_proj
    plain = all(map(is_plain, dense)) and is_plain(mixer.decay_up, biased=True)
    if not plain or config.feature_map != "identity":
        return False
    if op.form != "chunk" or op.names() not in ((), ("mosaic_gpu",)):
        return False

    decode_step, row_product = decode_steps(), row_products()
    widths = tuple(layer.kernel.get_value().shape[-1] for layer in dense[:-1])
    values, size = dense[-1].kernel.get_value().shape[-2:]
    heads, x = config.num_heads, _shape(batch, mixer.hidden_size)
    memory = _shape(batch, heads, mixer.key_dim, mixer.value_dim, dtype=jnp.float32)
    q, v = _shape(*memory.shape[:3]), _shape(batch, heads, mixer.value_dim)
    if decode_step.unsupported(q, v, memory) is not None:
        return False
    if batch > MOST_ROWS:
        return True
    gate: Any = _shape(batch, values)
    scale: Any = _shape(mixer.value_dim)
    gated = row_product.GatedNorm(gate, scale, 0.0)
    into = row_product.unsupported(x, _shape(sum(widths), x.shape[1]), None, widths)
    out = row_product.unsupported(_shape(batch, values), _shape(size, values), gated)
    return into is None and out is None


def _is_tiled(block: Any, batch: int) -> bool:
    """Return whether the products of a layer of gated linear attention are computed by tiles, where not each token writes the memories."""
    mixer = block.mixer
    width = sum(layer.kernel.get_value().shape[-1] for layer in _gla_projections(mixer))
    values, size = mixer.o_proj.kernel.get_value().shape[-2:]
    inner = block.feedforward.config.width(size)
    return token_tiles.supported(batch, width, size, mixer.config.num_heads, values, inner)


def prepare(model: Decoder, periods: tuple[Any, ...], batch: int) -> Prepared:
    """Return the matrices that the kernels read, from a model and the modules of its periods of layers (`Decoder.unstack_periods`); for a
    loop over tokens they are computed once, in front of it.
    """

    def joined(*kernels):
        return jnp.concatenate([k.astype(model.dtype).T for k in kernels])

    few, deferred = batch <= MOST_ROWS, group_of(model, batch) > 1

    def scaled(scale, *kernels):
        wide = (scale[:, None] * k.astype(jnp.float32) for k in kernels)
        return joined(*(k.astype(model.dtype) for k in wide))

    def of_layer(block):
        ff, into, out, gate_up, down = block.feedforward, None, None, None, None
        if deferred and _is_tiled(block, batch):
            mixer = block.mixer
            projections = [layer.kernel[...] for layer in _gla_projections(mixer)]
            into = scaled(block.mixer_norm.factors(), *projections)
            into = jnp.pad(into, ((0, -into.shape[0] % token_tiles.COLUMNS), (0, 0)))
            of_heads = jnp.tile(mixer.norm.factors(), mixer.config.num_heads)
            kernels = ff.gate_proj.kernel[...], ff.up_proj.kernel[...]
            gate_up = scaled(block.feedforward_norm.factors(), *kernels)
            out, down = scaled(of_heads, mixer.o_proj.kernel[...]), joined(ff.down_proj.kernel[...])
            return _Matrices(into, out, gate_up, down)
        if _is_served_gla(block.mixer, batch):
            into = joined(*(layer.kernel[...] for layer in _gla_projections(block.mixer)))
            out = joined(block.mixer.o_proj.kernel[...]) if few else None
        if few:
            gate_up = joined(ff.gate_proj.kernel[...], ff.up_proj.kernel[...])
            down = joined(ff.down_proj.kernel[...])
        return _Matrices(into, out, gate_up, down)

    layers = tuple(tuple(map(of_layer, period.blocks)) for period in periods)
    if not few:
        return Prepared(layers, None)
    tied = model.lm_head is None
    head = model.embedding[...].astype(model.dtype) if tied else joined(model.head())
    return Prepared(layers, head)


def group_of(model: Decoder, batch: int) -> int:
    """Return the number of tokens of which one writes the memories of `batch` rows of a model of gated linear attention, `GROUP` or 1."""
    if GROUP == 1 or batch < DEFERRED_ROWS:
        return 1
    unsupported = decode_steps().deferred_unsupported

    def supported(mixer):
        memory = _shape(batch, mixer.config.num_heads, mixer.key_dim, mixer.value_dim, dtype=jnp.float32)  # fmt: skip
        up = _shape(*mixer.decay_up.kernel.get_value().shape[-2:])
        width = sum(layer.kernel.get_value().shape[-1] for layer in _gla_projections(mixer))
        return mixer.key_dim in DEFERRED_KEYS and unsupported(memory, _shape(batch, width), up, GROUP) is None  # fmt: skip

    return GROUP if all(supported(block.mixer) for block in model.periods.blocks) else 1


def empty_writes(model: Decoder, state: DecoderState, batch: int) -> Pending | None:
    """Return empty buffers for the writes of a group of tokens to the memories of a state from `Decoder.unstack_state`; None if each token of
    `batch` rows of a model that the kernels serve writes.
    """
    if (group := group_of(model, batch)) == 1:
        return None
    empty = decode_steps().empty_writes
    layers = tuple(
        tuple(empty(mixer.memory.memory, group, model.dtype) for mixer, _ in states)
        for states in state.layers.each
    )
    return Pending(jnp.int32(0), layers)


def with_writes(state: DecoderState, pending: Pending | None) -> DecoderState:
    """Return the state whose memories hold the pending writes, if there are any."""
    if pending is None:
        return state
    apply = decode_steps().apply_writes

    def of_layer(states, writes):
        mixer, inner = states
        matrix = apply(mixer.memory.memory, writes, pending.count)
        return mixer._replace(memory=mixer.memory._replace(memory=matrix)), inner

    each = (tuple(map(of_layer, *pair)) for pair in zip(state.layers.each, pending.layers, strict=True))  # fmt: skip
    return state._replace(layers=PeriodStates(tuple(each)))


def pass_token(
    model: Decoder,
    periods: tuple[Any, ...],
    prepared: Prepared,
    token: jax.Array,
    state: DecoderState,
    pending: Pending | None = None,
) -> tuple[jax.Array, DecoderState, Pending | None]:
    """Return the logits [B, V] after one token [B] of each row, in float32, the state after it, and the writes that it does not hold.

    Args:
        model: a decoder that the kernels serve (`serves`).
        periods: what `Decoder.unstack_periods` returned.
        prepared: what `prepare` returned.
        token: int [B].
        state: a state from `Decoder.unstack_state`.
        pending: the writes that it does not hold, first from `empty_writes`.
    """
    x, squares = model.embed(token[:, None]), None
    positions, clock = mixers.advance(state.clock, x.shape[:2], None, None)
    shared, place, after, writes = model.init_shared(x), 0, [], []
    few = len(token) <= MOST_ROWS
    tiled = not few and any(x.gate_up is not None for period in prepared.layers for x in period)
    if tiled and pending is None:
        raise ValueError(
            "pass_token: `pending` is None, but these rows' writes are deferred; accepted is what `empty_writes` returned"
        )
    waiting = pending.layers if pending else [[None] * len(period.blocks) for period in periods]
    for period, *layers in zip(periods, prepared.layers, state.layers.each, waiting, strict=True):
        after.append([])
        writes.append([])
        for block, of_layer, (mixer_state, inner_state), write in zip(period.blocks, *layers, strict=True):  # fmt: skip
            if pending is not None and write is not None:
                deferred = of_layer, Stream(x, squares), mixer_state, write, pending.count
                (x, squares), mixer_state, write = _gla_deferred(block, *deferred)
            elif of_layer.into is not None and few:
                x, mixer_state = _gla_token(block, of_layer, x, mixer_state)
            elif of_layer.into is not None:
                x, mixer_state = _gla_tokens(block, of_layer, x, mixer_state)
            else:
                call = dict(layer=jnp.int32(place), positions=positions, state=mixer_state)
                y, mixer_state, context = block.mixer.run(
                    block.mixer_norm(x), shared=shared, **call
                )
                x, shared = x + y, dict(context.shared)
            if few:
                x = _feedforward_token(block, of_layer, x)
            elif of_layer.gate_up is not None:
                x, squares = _feedforward_tiles(block, of_layer, Stream(x, squares))
            else:
                x = x + block.feedforward.transform(block.feedforward_norm(x))
            after[-1].append((mixer_state, inner_state))
            writes[-1].append(write)
            place += 1
    state = DecoderState(PeriodStates(tuple(map(tuple, after))), clock)
    if pending:
        group = writes[0][0].keys.shape[1] + 1
        pending = Pending((pending.count + 1) % group, tuple(map(tuple, writes)))
    if not few:
        return model.logits(model.last_norm(x)[:, 0]), state, pending
    norm = _norm(model.norm, model.logits_scale)
    logits = _product(x[:, 0], prepared.head, norm, dtype=jnp.float32)[0]
    return capped(logits, model.logits_cap), state, pending


def _product(*arguments, **options):
    return row_products().row_product(*arguments, **options, interpret=_INTERPRET)


def _norm(norm: Any, factor: float = 1.0):
    scale = norm.factors()
    return row_products().Norm(scale if factor == 1 else factor * scale, norm.eps)


def _gla_memory(mixer: GLA, down: jax.Array, up: jax.Array | None, state: Any, *tokens, **options):
    """Return the output [B, H, V] of the memory of gated linear attention for queries, keys and values, and the mixer's state after them.

    Args:
        mixer: the mixer.
        down: the inner channels of the decay's gate, or the gate without its bias.
        up: the matrix from the inner channels to the gate, or None.
        state: the mixer's state.
        tokens: queries, keys and values.
        options: `columns` of `decode_step`.
    """
    kernel = decode_steps()
    bias: Any = mixer.decay_up.bias
    gate = kernel.Gate(down, up, bias[...].astype(jnp.float32), mixer.config.gate_temperature)
    memory, scale = state.memory, mixer.key_dim**-0.5
    o, matrix = kernel.decode_step(
        memory.memory, *tokens, gate=gate, scale=scale, interpret=_INTERPRET, **options
    )
    return o, state._replace(memory=memory._replace(memory=matrix))


def _gla_token(block: Any, matrices: _Matrices, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
    """Return the stream x [B, 1, D] of a few rows with the output of gated linear attention added, and the mixer's state."""
    mixer, x = block.mixer, x[:, 0]
    widths = tuple(layer.kernel[...].shape[-1] for layer in _gla_projections(mixer))
    *tokens, gate, down = _product(x, matrices.into, _norm(block.mixer_norm), widths=widths)
    tokens = [split_heads(a, mixer.config.num_heads) for a in tokens]
    up = mixer.decay_up.kernel[...].astype(x.dtype)
    o, state = _gla_memory(mixer, down, up, state, *tokens)
    head_norm = row_products().GatedNorm(gate, mixer.norm.factors(), mixer.norm.eps)
    return _product(o.reshape(x.shape[0], -1), matrices.out, head_norm, added=x)[0][:, None], state


def _gla_columns(mixer: GLA) -> tuple[int, ...]:
    """Return the columns at which keys, values, gate and decay's inner channels begin in the product of a mixer's input; queries are first."""
    widths = (layer.kernel[...].shape[-1] for layer in _gla_projections(mixer))
    return tuple(itertools.accumulate(widths))[:-1]


def _gla_output(mixer: GLA, x: jax.Array, o: jax.Array, gate: jax.Array) -> jax.Array:
    """Return the stream x [B, 1, D] with the output of a mixer added, from that of its memory o [B, H, V] and the gate [B, H V]."""
    gate = split_heads(gate[:, None], mixer.config.num_heads)
    return x + normed_product(mixer.norm, mixer.o_proj, o[:, None], gate)


def _gla_tokens(block: Any, matrices: _Matrices, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
    """Return the stream x [B, 1, D] of many rows with the output of gated linear attention added, and the mixer's state."""
    mixer, up = block.mixer, block.mixer.decay_up.kernel[...]
    keys, values, gates, down = _gla_columns(mixer)
    y = project(block.mixer_norm(x)[:, 0], matrices.into.T)
    logits = project(y[:, down : down + up.shape[0]], up, dtype=jnp.float32)
    o, state = _gla_memory(mixer, logits, None, state, y, y, y, columns=(0, keys, values))
    return _gla_output(mixer, x, o, y[:, gates:down]), state


def _gla_deferred(
    block: Any, matrices: _Matrices, stream: Stream, state: Any, writes: Any, count: jax.Array
) -> tuple[Stream, Any, Any]:
    """Return the same, and the pending writes, of `count` tokens before this one, to its memory."""
    tiled = matrices.gate_up is not None
    mixer, memory, up = block.mixer, state.memory, block.mixer.decay_up
    keys, values, gates, down = _gla_columns(mixer)
    if tiled:
        y = _normed_product("into", stream, matrices.into, block.mixer_norm)
    else:
        y = project(block.mixer_norm(stream.x)[:, 0], matrices.into.T)
    o, matrix, writes = decode_steps().deferred_step(
        memory.memory, writes, count, y, up.kernel[...].astype(y.dtype), up.bias[...],
        columns=(0, keys, values, down), temperature=mixer.config.gate_temperature, scale=mixer.key_dim**-0.5,
        gate=gates if tiled else None, interpret=_INTERPRET,
    )  # fmt: skip
    state = state._replace(memory=memory._replace(memory=matrix))
    if not tiled:
        return Stream(_gla_output(mixer, stream.x, o, y[:, gates:down])), state, writes
    gated, squares = o
    gated = gated.reshape(y.shape[0], -1)
    normed = dict(eps=mixer.norm.eps, squares=squares)
    return _added_product("out", stream, matrices.out, gated, **normed), state, writes


def _feedforward_tiles(block: Any, matrices: _Matrices, stream: Stream) -> Stream:
    """Return the stream of many rows with the output of the feedforward added."""
    norm = block.feedforward_norm
    hidden = _normed_product("gate_up", stream, matrices.gate_up, norm, swiglu=True)
    return _added_product("down", stream, matrices.down, hidden)


def _normed_product(name: str, stream: Stream, matrix: jax.Array, norm: RMSNorm, **options):
    """Return the product [B, F] of the normed stream with a matrix that contains the norm's scale."""
    x, squares = stream
    call = dict(eps=norm.eps, squares=squares, interpret=_INTERPRET)
    return token_tiles.product(name, x[:, 0], matrix, **call, **options)


def _added_product(name: str, stream: Stream, matrix: jax.Array, x: jax.Array, **options):
    """Return the stream with the product of x [B, I] with a matrix added, and its squares."""
    call = dict(added=stream.x[:, 0], with_squares=True, interpret=_INTERPRET)
    y, squares = token_tiles.product(name, x, matrix, **call, **options)
    return Stream(y[:, None], squares)


def _feedforward_token(block: Any, matrices: _Matrices, x: jax.Array) -> jax.Array:
    """Return the stream x [B, 1, D] of a few rows with the output of the feedforward added."""
    x = x[:, 0]
    hidden = _product(x, matrices.gate_up, _norm(block.feedforward_norm), swiglu=True)[0]
    return _product(hidden, matrices.down, added=x)[0][:, None]
