"""Small Mixtures-of-Memories, and their definition: for each memory, the inner mixer on the tokens that are
routed to it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lsm_jax import mixers
from lsm_jax.mixers import Context
from tests.mixers.conftest import changed, stir

WIDTH, BATCH, LENGTH = 16, 2, 11
ROW_CONV = "gla, convolutions along rows"
"""GLA with short convolutions along each memory's tokens, and one along the row's."""
INNER = tuple(name for name, m in mixers.METHODS.items() if m.module.memory_parts)
X = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, WIDTH))
NUM_LAYERS = 2
FORMS = ("packed", "masked")


def config_of(name="gated_deltanet", *, inner=None, **fields) -> mixers.MoMConfig:
    """Return the config of a small Mixture-of-Memories around the inner mixer `name`, with chunks of four
    tokens; `ROW_CONV` is one with two kinds of short convolutions.
    """
    if name == ROW_CONV:
        name, inner = "gla", dict(conv_size=3) | (inner or {})
        fields = dict(row_conv_size=4) | fields
    method = mixers.METHODS[name]
    config = method.config.for_width(WIDTH)
    given = dict(chunk_size=4) | (inner or {})
    if hasattr(
        config, "mini_batch"
    ):  # several for each memory; a norm of two channels is only a sign
        given = dict(mini_batch=3, num_heads=2) | given
    if name == "gated_deltanet":
        given = dict(num_heads=2, head_dim=4, expand_v=1.0) | given
    return mixers.MoMConfig(mixer=changed(config, **given), **fields)


def build(config) -> mixers.Mixer:
    """Return the Mixture-of-Memories (or mixer) of a config, with parameters so large that gates matter."""
    options = dict(init_std=0.3, layer=1, num_layers=NUM_LAYERS)
    mixer = mixers.build(config, WIDTH, rngs=nnx.Rngs(0), **options)
    stir(mixer)
    return mixer


@functools.cache
def _made(name, fields) -> mixers.Mixer:
    return build(config_of(name, **dict(fields)))


def made(name="gated_deltanet", **fields) -> mixers.MoM:
    """Return the small Mixture-of-Memories around the inner mixer `name`, with the config's `fields`
    replaced; equal arguments return the same module, from a cache.
    """
    return _made(name, tuple(sorted(fields.items())))


def shared_of(mixer, x):
    """Return the values that are shared between layers when `mixer` is the second of two layers with equal
    parameters and the input is x.
    """
    inner = mixer.innermost()
    stacked = jax.tree.map(lambda p: jnp.stack([jax.lax.stop_gradient(p), p]), inner)
    shared = type(inner).init_shared(x, [(jnp.arange(2), stacked)])
    if "v_first" in shared:
        shared["v_first"] = jnp.sin(3 * x)
    return shared


@jax.jit
def call(mixer, x, **arguments):
    """Call a Mixture-of-Memories on x [B, T, D] as the second of two layers of a model, and return (y, state,
    aux): output, final state, and auxiliary statistics.
    """
    return mixer(x, layer=1, shared=shared_of(mixer, x), **arguments)


def number(y):
    """Return one number that depends on every entry of a mixer's output y, to take gradients of."""
    return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))


def _both(mixer, x):
    y = mixer(x, layer=1, shared=shared_of(mixer, x))[0]
    return number(y), y


gradient = jax.jit(
    jax.grad(_both, argnums=(0, 1), has_aux=True)
)  # (gradients of the mixer, of x), y


def choices(mixer, x) -> np.ndarray:
    """Return bool [B, T, G], computed by numpy: whether each of the tokens x [B, T, D] is routed to each of
    G memories.
    """
    config = mixer.config
    kernel = np.asarray(mixer.router.kernel[...], np.float64)
    logits = np.asarray(x, np.float64) @ kernel
    order = np.argsort(-logits, axis=-1, kind="stable")[..., : config.top_k]
    chosen = np.zeros((*x.shape[:2], config.num_groups()), bool)
    np.put_along_axis(chosen, order, True, axis=-1)
    chosen[..., config.num_memories :] = True
    return chosen


def copied(module):
    """Return a copy of an nnx module with new variables, so that changing the parameters of the copy does not
    change the original (a module made by `nnx.merge` would have the same variables).
    """
    return jax.tree.map(lambda p: p, module)


def _memory_parameters(mixer) -> dict:
    """Return the parameters of a Mixture-of-Memories that differ between its G memories, arrays [G, ...] by
    path.
    """
    if mixer.config.single_projections:
        return {}
    parts = mixer.inner.memory_parts
    flat = nnx.to_flat_state(nnx.state(mixer.inner, nnx.Param))
    return {path: p.get_value() for path, p in flat if path[0] in parts}


def _with_parameters(mixer, parameters: dict) -> mixers.Mixer:
    inner = copied(mixer.inner)
    flat = nnx.to_flat_state(nnx.state(inner, nnx.Param))
    new = {path: p.replace(parameters[path]) if path in parameters else p for path, p in flat}
    nnx.update(inner, nnx.from_flat_state(new))
    return inner


def memory(mixer, index: int) -> mixers.Mixer:
    """Return the inner mixer with the parameters of the memory number `index` of a Mixture-of-Memories."""
    return _with_parameters(
        mixer, {path: p[index] for path, p in _memory_parameters(mixer).items()}
    )


def definition(mixer, x, chosen):
    """Return the output y [B, T, D] of a Mixture-of-Memories by its definition: for each memory, select its
    tokens (`chosen` is the result of `choices`), apply the inner mixer to them as one sequence, and add
    the outputs at the tokens' positions.
    """
    batch, length, _ = x.shape
    groups = mixer.config.num_groups()
    chosen = jnp.asarray(chosen)
    probability = jax.nn.softmax(x @ mixer.router.kernel[...], axis=-1)
    selected = probability * chosen[..., : mixer.config.num_memories]
    weight = selected / selected.sum(-1, keepdims=True)
    weight = jnp.concatenate([weight, jnp.ones((batch, length, 1))], axis=-1)[..., :groups]
    weight = jnp.where(chosen, weight, 0)
    shared = shared_of(mixer, x)
    tokens = x if mixer.row_conv is None else x + mixer.row_conv(x, Context())[0]

    def along(a, index):
        return jnp.take_along_axis(a, index.reshape(*index.shape, *(1,) * (a.ndim - 2)), axis=1)

    def one(parameters, order, back, weight):
        """Return the outputs of one memory of the Mixture-of-Memories for all tokens, times each token's
        weight for it. `order` [B, T] has the positions of the memory's tokens first, in order, and then
        those of the other tokens; `back` is its inverse.
        """
        inner = _with_parameters(mixer, parameters)
        cut = {n: along(s, order) if n in inner.shared_by_token else s for n, s in shared.items()}
        positions = jnp.broadcast_to(jnp.arange(length), order.shape)
        if not inner.positions_in_memory:
            positions = order
        context = Context(1, cut, positions=positions if inner.uses_positions else None)
        o, _, context = inner.through_memory(along(tokens, order), context, None)

        def put(y):
            w = weight.reshape(batch, length, *(1,) * (y.ndim - 2))
            return jnp.where(w != 0, along(y, back), 0) * w

        return put(o), {name: put(y) for name, y in context.bypass.items()}

    order = jnp.argsort(~jnp.moveaxis(chosen, 2, 0), axis=2, stable=True).astype(jnp.int32)
    back = jnp.argsort(order, axis=2)
    given = _memory_parameters(mixer), order, back, jnp.moveaxis(weight, 2, 0)
    total, bypass = jax.tree.map(lambda y: y.sum(0), jax.vmap(one)(*given))
    return mixer.inner.finish(total, x, Context(1, shared, bypass=bypass))[0]


oracle = jax.jit(definition)


def float_arrays(state):
    """Return the floating-point arrays of a Mixture-of-Memories' state: all but segment ids and counts."""
    return [s for s in jax.tree.leaves(state) if jnp.issubdtype(s.dtype, jnp.inexact)]
