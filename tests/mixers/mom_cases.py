"""Small Mixtures-of-Memories, and their definition as a loop over memories, each an inner mixer on its own subsequence."""

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
INNER = tuple(name for name, m in mixers.METHODS.items() if m.module.memory_parts)
X = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, WIDTH))
NUM_LAYERS = 2


def config_of(name="gated_deltanet", *, inner=None, **fields) -> mixers.MoMConfig:
    """A small config of this inner mixer, in chunks of four."""
    method = mixers.METHODS[name]
    own = method.config.for_width(WIDTH)
    given = dict(chunk_size=4) | (inner or {})
    if hasattr(own, "mini_batch"):  # several for each memory; a norm of two channels is only a sign
        given = dict(mini_batch=3, num_heads=2) | given
    if name == "gated_deltanet":
        given = dict(num_heads=2, head_dim=4, expand_v=1.0) | given
    return mixers.MoMConfig(mixer=changed(own, **given), **fields)


def build(config) -> mixers.Mixer:
    """The mixer, with parameters large enough for gates to matter."""
    options = dict(init_std=0.3, layer=1, num_layers=NUM_LAYERS)
    mixer = mixers.build(config, WIDTH, rngs=nnx.Rngs(0), **options)
    stir(mixer)
    return mixer


@functools.cache
def _made(name, fields) -> mixers.Mixer:
    return build(config_of(name, **dict(fields)))


def made(name="gated_deltanet", **fields) -> mixers.MoM:
    """The mixer of `config_of`, made once."""
    return _made(name, tuple(sorted(fields.items())))


def shared_of(mixer, x):
    """What travels from layer to layer, for the second of two equal layers."""
    inner = mixer.innermost()
    stacked = jax.tree.map(lambda p: jnp.stack([jax.lax.stop_gradient(p), p]), inner)
    shared = type(inner).init_shared(x, [(jnp.arange(2), stacked)])
    if "v_first" in shared:
        shared["v_first"] = jnp.sin(3 * x)
    return shared


@jax.jit
def call(mixer, x, **arguments):
    """(y, state, aux) of the mixer as a model's second layer."""
    return mixer(x, layer=1, shared=shared_of(mixer, x), **arguments)


def number(y):
    """A number that depends on every entry of y."""
    return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))


def _both(mixer, x):
    y = mixer(x, layer=1, shared=shared_of(mixer, x))[0]
    return number(y), y


gradient = jax.jit(jax.grad(_both, argnums=(0, 1), has_aux=True))  # (of the mixer, of x), y


def choices(mixer, x) -> np.ndarray:
    """bool [B, T, G]: the memories of each token, in numpy."""
    config = mixer.config
    kernel = np.asarray(mixer.router.kernel[...], np.float64)
    logits = np.asarray(x, np.float64) @ kernel
    order = np.argsort(-logits, axis=-1, kind="stable")[..., : config.top_k]
    chosen = np.zeros((*x.shape[:2], config.num_groups()), bool)
    np.put_along_axis(chosen, order, True, axis=-1)
    chosen[..., config.num_memories :] = True
    return chosen


def copied(module):
    """The same module with parameters that may be changed (`nnx.merge` shares them)."""
    return jax.tree.map(lambda p: p, module)


def _own_parts(mixer) -> dict:
    """The parameters that each memory has of its own, [G, ...] by path."""
    if mixer.config.single_projections:
        return {}
    parts = mixer.inner.memory_parts
    flat = nnx.to_flat_state(nnx.state(mixer.inner, nnx.Param))
    return {path: p.get_value() for path, p in flat if path[0] in parts}


def _with_parts(mixer, own: dict) -> mixers.Mixer:
    inner = copied(mixer.inner)
    flat = nnx.to_flat_state(nnx.state(inner, nnx.Param))
    new = {path: p.replace(own[path]) if path in own else p for path, p in flat}
    nnx.update(inner, nnx.from_flat_state(new))
    return inner


def memory(mixer, index: int) -> mixers.Mixer:
    """The inner mixer with the parameters of one memory."""
    return _with_parts(mixer, {path: p[index] for path, p in _own_parts(mixer).items()})


def definition(mixer, x, chosen):
    """y [B, T, D]: each memory's tokens cut out (`chosen`, of `choices`), mixed there by the inner mixer, and put back."""
    batch, length, _ = x.shape
    groups = mixer.config.num_groups()
    chosen = jnp.asarray(chosen)
    probability = jax.nn.softmax(x @ mixer.router.kernel[...], axis=-1)
    kept = probability * chosen[..., : mixer.config.num_memories]
    weight = kept / kept.sum(-1, keepdims=True)
    weight = jnp.concatenate([weight, jnp.ones((batch, length, 1))], axis=-1)[..., :groups]
    weight = jnp.where(chosen, weight, 0)
    shared = shared_of(mixer, x)

    def along(a, index):
        return jnp.take_along_axis(a, index.reshape(*index.shape, *(1,) * (a.ndim - 2)), axis=1)

    def one(own, order, back, weight):
        """What one memory gives to every token; its tokens stand first, in order, the others later in time."""
        inner = _with_parts(mixer, own)
        cut = {n: along(s, order) if n in inner.shared_by_token else s for n, s in shared.items()}
        positions = jnp.broadcast_to(jnp.arange(length), order.shape)
        if not inner.positions_in_memory:
            positions = order
        context = Context(1, cut, positions=positions if inner.uses_positions else None)
        o, _, context = inner.through_memory(along(x, order), context, None)

        def put(y):
            w = weight.reshape(batch, length, *(1,) * (y.ndim - 2))
            return jnp.where(w != 0, along(y, back), 0) * w

        return put(o), {name: put(y) for name, y in context.bypass.items()}

    order = jnp.argsort(~jnp.moveaxis(chosen, 2, 0), axis=2, stable=True).astype(jnp.int32)
    back = jnp.argsort(order, axis=2)
    given = _own_parts(mixer), order, back, jnp.moveaxis(weight, 2, 0)
    total, bypass = jax.tree.map(lambda y: y.sum(0), jax.vmap(one)(*given))
    return mixer.inner.finish(total, x, Context(1, shared, bypass=bypass))[0]


oracle = jax.jit(definition)
