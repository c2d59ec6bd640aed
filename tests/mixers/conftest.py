"""Fixtures with a small mixer of every method. The default test run has one method for each class of
transition, and softmax attention.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from lsm_jax import mixers

WIDTH, BATCH, LENGTH = 32, 2, 10
FAST = (
    "linear_attention",
    "gla",
    "mamba",
    "gated_deltanet",
    "rwkv7",
    "gsa",
    "ttt_linear",
    "softmax",
)
FEW = ("gla", "gated_deltanet", "softmax")


def pytest_generate_tests(metafunc):
    if "method" in metafunc.fixturenames:
        fast = FEW if metafunc.definition.get_closest_marker("few") else FAST
        rows = [
            pytest.param(m, marks=() if name in fast else pytest.mark.slow, id=name)
            for name, m in mixers.METHODS.items()
        ]
        metafunc.parametrize("method", rows)


def run(mixer, x, **call):
    """Call the mixer on x [B, T, D] as the second of two layers of a model, with the values `shared`
    between layers; returns what the mixer returns. The first layer has the same parameters, without
    gradients.
    """
    stacked = jax.tree.map(lambda p: jnp.stack([jax.lax.stop_gradient(p), p]), mixer)
    shared = type(mixer).init_shared(x, [(jnp.arange(2), stacked)])
    return mixer(x, layer=1, shared=shared, **call)


def _loss(mixer, x):
    """Return a number that depends on every output of the mixer for x and on every entry of its final
    memory, and (output, final state).
    """
    y, state, _ = run(mixer, x)
    of_y = jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))
    memory = [leaf for leaf in jax.tree.leaves(state.memory) if leaf.ndim > 1]
    parts = [part for leaf in memory for part in (jnp.real(leaf), jnp.imag(leaf))]
    return of_y + sum(jnp.sum(jnp.sin(part)) for part in parts), (y, state)


def stir(module, *, kernels_only: bool = False):
    """Add seeded noise to those parameters of a module whose entries are all equal, since a parameter of
    zeros would hide errors in everything that it multiplies.

    With `kernels_only`, noise is added only to kernels (weight matrices) that are zero.
    """
    state = nnx.state(module, nnx.Param)
    for index, (path, param) in enumerate(nnx.to_flat_state(state)):
        value = param[...]
        skipped = kernels_only and (path[-1] != "kernel" or (value != 0).any())
        if not skipped and (value == value.ravel()[0]).all():
            noise = jax.random.normal(jax.random.key(1000 + index), value.shape, value.dtype)
            param[...] = value + 0.1 * noise
    nnx.update(module, state)


def changed(config, **fields):
    """Return a mixer's config with fields replaced; names that are fields of `config.op` replace those."""
    if isinstance(config, mixers.RecurrentConfig):
        names = [f.name for f in dataclasses.fields(config.op) if f.name in fields]
        op = dataclasses.replace(config.op, **{name: fields.pop(name) for name in names})
        fields["op"] = op
    return dataclasses.replace(config, **fields)


class Small:
    """A small mixer of one method for tests, under `jax.jit`, with parameters so large that gates matter, and
    an input x [B, T, D]. With `stirred=True`, noise is added to the parameters that start with equal
    entries.
    """

    def __init__(self, method: mixers.Method, *, stirred: bool = False, **fields):
        config = method.config.for_width(WIDTH)
        if method.forms:
            fields = dict(chunk_size=4) | fields
        if hasattr(config, "mini_batch"):  # so that a row has several mini-batches
            fields = dict(mini_batch=3) | fields
        self.config = changed(config, **fields)
        options = dict(init_std=0.2, layer=1, num_layers=2)
        self.mixer = mixers.build(self.config, WIDTH, rngs=nnx.Rngs(0), **options)
        if stirred:
            stir(self.mixer)
        self.x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, WIDTH))
        self.call = jax.jit(lambda mixer, x, **call: run(mixer, x, **call)[:2])
        self.gradient = jax.jit(jax.grad(_loss, argnums=(0, 1), has_aux=True))

    def __call__(self, x=None, **call):
        """Run the small mixer, under `jax.jit`, on the given input x (None: its stored random input), and
        return (output, state).
        """
        return self.call(self.mixer, self.x if x is None else jnp.asarray(x), **call)

    def state(self, dtype=jnp.float32):
        return self.mixer.init_state(BATCH, LENGTH, dtype)


@functools.cache
def _small(name: str) -> Small:
    return Small(mixers.METHODS[name], stirred=True)


@pytest.fixture
def small(method):
    return _small(method.name)


@pytest.fixture
def make():
    return functools.partial(Small, stirred=True)
