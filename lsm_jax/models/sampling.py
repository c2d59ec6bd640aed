"""Generation: prefill, then one token at a time, with a state of constant size."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax.models import token_step
from lsm_jax.models.decoder import Decoder, DecoderState, PeriodStates
from lsm_jax.models.narrow import cast_in_advance

UNROLLED = 64
"""The largest number of layers that one token passes through without a loop where no call says otherwise."""
_MEMORY = 0.7  # of the device, which two copies of parameters and states may fill
# Graph definitions whose programs XLA does not compile with `compiler_options`.
_REFUSED: set[Any] = set()


def sample(
    model: Decoder,
    prompt: jax.Array,
    *,
    num_tokens: int,
    key: jax.Array,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_token: int | None = None,
    segment_ids: jax.Array | None = None,
    prefill_chunk: int | None = None,
    unroll_layers: bool | None = None,
) -> jax.Array:
    """Continue each prompt with tokens drawn from the model, one at a time, from a state of constant size.

    Args:
        model: the decoder.
        prompt: int [B, T].
        num_tokens: number of tokens to generate.
        key: a key of `jax.random`.
        temperature: divides the logits; 0 selects the likeliest token.
        top_k: draw only from the k likeliest tokens; None means no limit.
        top_p: a number in (0, 1]: draw only from the smallest set of likeliest tokens whose probabilities sum
            to at least this; None means no limit.
        stop_token: after a row has drawn this token, the rest of the row is filled with it; generation ends
            when all rows have drawn it.
        segment_ids: int [B, T], 0 where the prompt is padded, on either side; each row continues its last
            real token.
        prefill_chunk: the number of prompt tokens to read in one call of the model, to limit memory use; None
            reads the whole prompt in one call.
        unroll_layers: whether a token passes through the layers one after the other, each with parameters in arrays of its own,
            instead of through a loop that copies each layer's parameters out of the stack of all. The layers' parameters are then
            stored twice during the call, the second time in the dtype in which they multiply, and the program is larger. True is
            accepted on one device. None: on one GPU, up to `UNROLLED` layers, if two copies of parameters and states, and what else
            is in its memory, fill less than 0.7 of what JAX may allocate.

    Returns:
        The generated tokens, int32 [B, num_tokens].

    Raises:
        ValueError: an argument is not accepted.
    """
    prompt = jnp.asarray(prompt, jnp.int32)
    _check(
        model, prompt, num_tokens, temperature, top_k, top_p, stop_token, segment_ids, prefill_chunk
    )
    meshes = jax.sharding.get_abstract_mesh(), jax.typeof(model.embedding[...]).sharding.mesh
    one_device = all(mesh.empty for mesh in meshes)
    if unroll_layers and not one_device:
        raise ValueError("unroll_layers=True: accepted on one device, not on a mesh")
    if unroll_layers is None:
        device = next(iter(model.embedding[...].devices()))
        length = prompt.shape[1] + num_tokens
        unroll_layers = one_device and _unrolls(model, device, len(prompt), length)
    graphdef, params = nnx.split(model)
    hidden, state = read_prompt(
        graphdef,
        params,
        prompt,
        segment_ids,
        capacity=cache_capacity(prompt.shape[1] + num_tokens),
        prefill_chunk=prefill_chunk,
        unroll_layers=unroll_layers,
    )
    nucleus = None if top_p is None else jnp.float32(top_p)
    arrays = params, hidden, state, key, jnp.float32(temperature), nucleus
    batch = len(prompt)
    on_gpu = token_step.runs_on(model.embedding[...].devices())
    by_kernels = unroll_layers and on_gpu and token_step.serves(model, batch)
    static = dict(num_tokens=num_tokens, greedy=temperature == 0, top_k=top_k, stop_token=stop_token, by_kernels=by_kernels)  # fmt: skip
    if compiler_options(batch, unroll_layers) and graphdef not in _REFUSED:
        try:
            return program(batch, unroll_layers)(graphdef, *arrays, **static)[0]
        except jax.errors.JaxRuntimeError as error:
            if "RET_CHECK" not in str(error):
                raise
            _REFUSED.add(graphdef)
    return _jitted(())(graphdef, *arrays, **static)[0]


def _unrolls(model: Decoder, device: jax.Device, batch: int, length: int) -> bool:
    """Return whether one token passes through unrolled layers by default; `sample` gives the rule."""
    stats = (device.memory_stats() or {}) if device.platform == "gpu" else {}
    if "bytes_limit" not in stats or model.num_periods * len(model.periods.blocks) > UNROLLED:
        return False
    states = jax.eval_shape(lambda: model.init_state(batch, cache_capacity(length)))
    params, states = (
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
        for tree in (nnx.state(model), states)
    )
    others = max(0, stats.get("bytes_in_use", 0) - params)
    return 2 * (params + states) + others <= _MEMORY * stats["bytes_limit"]


def cache_capacity(length: int) -> int:
    """Return the tokens for which caches are made where a row has `length` of them, a multiple of 64.

    XLA would copy a cache whose length is no multiple of 8 before it multiplies; 64 tokens are a block of kernels.
    """
    return -(-length // 64) * 64


def compiler_options(batch: int, unroll_layers: bool) -> dict[str, str] | None:
    """Return the options with which a program that decodes tokens of `batch` rows is compiled.

    XLA computes the product of one row and a matrix as a sum of products, which it stores, in bfloat16, before it adds them. On a GPU
    with `unroll_layers` this replacement is disabled. XLA then fails (RET_CHECK) if a model has products whose result is a single
    number, as some ops have for one token; `sample` decodes such a model without the options.
    """
    if unroll_layers and batch == 1 and jax.default_backend() == "gpu":
        return {"xla_disable_hlo_passes": "dot-strength-reduction"}
    return None


def program(batch: int, unroll_layers: bool):
    """Return the jitted function `_decode` for so many rows."""
    return _jitted(tuple((compiler_options(batch, unroll_layers) or {}).items()))


@functools.cache
def _jitted(options: tuple[tuple[str, str], ...]):
    names = "graphdef", "num_tokens", "greedy", "top_k", "stop_token", "by_kernels"
    return jax.jit(
        _decode,
        static_argnames=names,
        donate_argnames="state",
        compiler_options=dict(options) or None,
    )


def _check(model, prompt, num_tokens, temperature, top_k, top_p, stop_token, segment_ids, chunk):
    if prompt.ndim != 2 or 0 in prompt.shape:
        raise ValueError(
            f"prompt has shape {prompt.shape}; accepted is [B, T] with at least one token"
        )
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= model.vocab_size:
        raise ValueError(
            f"prompt has token ids from {low} to {high}; accepted are 0 to {model.vocab_size - 1}"
        )
    if num_tokens < 1:
        raise ValueError(f"num_tokens={num_tokens}: it must be at least 1")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature}: accepted are 0 (greedy) and positive numbers")
    if top_k is not None and not 1 <= top_k <= model.vocab_size:
        raise ValueError(f"top_k={top_k}: accepted are None and 1 to {model.vocab_size}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: accepted are None and numbers in (0, 1]")
    if stop_token is not None and not 0 <= stop_token < model.vocab_size:
        raise ValueError(
            f"stop_token={stop_token}: accepted are None and 0 to {model.vocab_size - 1}"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"prefill_chunk={chunk}: accepted are None and 1 or more")
    if segment_ids is not None:
        if jnp.shape(segment_ids) != prompt.shape:
            raise ValueError(
                f"segment_ids has shape {jnp.shape(segment_ids)}; the prompt's is {prompt.shape}"
            )
        if not bool((jnp.asarray(segment_ids) != 0).any(axis=1).all()):
            raise ValueError(
                "segment_ids: a row of the prompt is all padding (0); accepted are rows with a token that is not"
            )


@functools.partial(jax.jit, static_argnames=("graphdef", "capacity", "prefill_chunk", "unroll_layers"))  # fmt: skip
def read_prompt(
    graphdef, params, prompt, segment_ids, *, capacity, prefill_chunk, unroll_layers
) -> tuple[Any, DecoderState]:
    """Return the hidden state [B, D] of each row's last real token, and the state after the prompt, of unstacked layers
    with `unroll_layers`."""
    model = nnx.merge(graphdef, params)
    state = model.init_state(len(prompt), capacity)
    hidden, state = _prefill(model, prompt, segment_ids, state, prefill_chunk)
    return hidden, model.unstack_state(state) if unroll_layers else state


def _decode(
    graphdef, params, hidden, state, key, temperature, top_p, *, num_tokens, greedy, top_k, stop_token,
    by_kernels=False,
):  # fmt: skip
    """Return the tokens [B, num_tokens] drawn after the hidden state [B, D] of each row's last token, the state after them, and the writes that
    it does not hold or None, which `token_step.with_writes` applies: `sample` needs no state.

    It is a program of its own, so that a prompt of another length does not compile it again unless its caches have another capacity.
    The state is an output so that the loop changes it in place. With `by_kernels`, for unrolled layers, a token passes by `token_step`.
    """
    model = nnx.merge(graphdef, params)
    batch = len(hidden)
    heat = jnp.maximum(temperature, jnp.finfo(jnp.float32).tiny)

    def draw(logits, step):
        if greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits -= jnp.max(logits, axis=-1, keepdims=True)  # so that no logit overflows
        logits = restrict(logits / heat, top_k=top_k, top_p=top_p)
        return jax.random.categorical(jax.random.fold_in(key, step), logits).astype(jnp.int32)

    fill = 0 if stop_token is None else stop_token
    tokens = jnp.full((batch, num_tokens), fill, jnp.int32)
    first = draw(model.logits(hidden), 0)
    done = jnp.zeros(batch, bool) if stop_token is None else first == stop_token

    unrolled = isinstance(state.layers, PeriodStates)
    periods: Any = model.unstack_periods() if unrolled else None

    prepared = token_step.prepare(model, periods, batch) if by_kernels else None

    pending = token_step.empty_writes(model, state, batch) if by_kernels else None

    def pass_token(model, periods, prepared, last, state, pending):
        if prepared is not None:
            return token_step.pass_token(model, periods, prepared, last, state, pending)
        hidden, state, _ = model.hidden(last[:, None], state=state, periods=periods)
        return model.logits(hidden[:, 0]), state, None

    if unrolled:

        def logits_of_token(params):
            model = nnx.merge(graphdef, params[0])
            return pass_token(model, params[1], prepared, first, state, pending)[0]

        params, periods = cast_in_advance((params, periods), model.dtype, logits_of_token)
        # The barrier keeps XLA from copying and casting them in each step.
        params, periods, prepared = jax.lax.optimization_barrier((params, periods, prepared))
        model = nnx.merge(graphdef, params)

    def unfinished(carry):
        step, _, done, *_ = carry
        return (step < num_tokens) & ~done.all()

    def body(carry):
        step, last, done, tokens, state, pending = carry
        logits, state, pending = pass_token(model, periods, prepared, last, state, pending)
        token = jnp.where(done, fill, draw(logits, step))
        if stop_token is not None:
            done = done | (token == stop_token)
        # No scatter, for which XLA would check the index by a kernel of its own.
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], step, axis=1)
        return step + 1, token, done, tokens, state, pending

    carry = (jnp.int32(1), first, done, tokens.at[:, 0].set(first), state, pending)
    *_, tokens, state, pending = jax.lax.while_loop(unfinished, body, carry)
    return tokens, state, pending


def _prefill(model, prompt, segment_ids, state, chunk):
    """Return the hidden state [B, D] of each row's last real token, and the decoder's state after the prompt."""
    batch, length = prompt.shape
    chunk = length if chunk is None else min(chunk, length)
    last = None
    for start in range(0, length, chunk):
        piece = slice(start, start + chunk)
        ids = None if segment_ids is None else segment_ids[:, piece]
        hidden, state, _ = model.hidden(prompt[:, piece], segment_ids=ids, state=state)
        if ids is None:
            last = hidden[:, -1]
            continue
        place = jnp.where(ids != 0, jnp.arange(ids.shape[1]), -1).max(axis=1)
        found = hidden[jnp.arange(batch), jnp.maximum(place, 0)]
        last = found if last is None else jnp.where(place[:, None] >= 0, found, last)
    return last, state


def restrict(
    logits: jax.Array, *, top_k: int | None = None, top_p: jax.Array | float | None = None
) -> jax.Array:
    """Return logits [..., V] with -inf for tokens that are not among the k likeliest, or outside the nucleus
    (the smallest set of likeliest tokens whose probabilities sum to `top_p`).

    The likeliest token is always allowed, and so are tokens tied with the least likely allowed token.
    """
    if top_k is not None:
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if top_p is not None:
        ordered = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
        probability = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        kept = (before < top_p).at[..., 0].set(True)  # a tiny top_p rounds to 0
        least = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits
