"""Fixtures with small decoders of every method, mixed with softmax attention. The default test run has one
method for each op.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from lsm_jax import mixers, models
from tests.mixers.conftest import FAST as CLASSES
from tests.mixers.conftest import stir

FAST = ("gla", "gated_deltanet")
VOCAB, BATCH, LENGTH = 50, 2, 10


def pytest_generate_tests(metafunc):
    if "method" not in metafunc.fixturenames:
        return
    names = CLASSES if metafunc.definition.get_closest_marker("classes") else mixers.METHODS
    marks = {name: () if name in FAST else pytest.mark.slow for name in names}
    if "pattern" not in metafunc.fixturenames:
        metafunc.parametrize("method", [pytest.param(n, marks=m) for n, m in marks.items()])
        return
    rows = [pytest.param(name, "LN", marks=mark) for name, mark in marks.items()]
    # Methods that are tested with several layers in a period: those whose layers share values, and two
    # others.
    rows += [pytest.param(name, "LLLN", marks=pytest.mark.slow) for name in (*FAST, "rwkv7")]
    metafunc.parametrize(("method", "pattern"), rows)


def derivatives(config: models.ModelConfig, tokens: jax.Array) -> tuple:
    """Return derivatives of a loss of a new model of the config by its parameters: in forward mode, second ones, and gradients under
    `jax.vmap`.
    """
    graphdef, params = nnx.split(models.Decoder(config, rngs=nnx.Rngs(0)))

    def loss(params):
        hidden, _, _ = nnx.merge(graphdef, params).hidden(tokens)
        return jnp.mean(hidden.astype(jnp.float32) ** 3)

    gradient = jax.grad(loss)
    _, tangent = jax.jvp(loss, (params,), (params,))
    _, second = jax.jvp(gradient, (params,), (params,))
    rows = jax.vmap(gradient)(jax.tree.map(lambda x: x[None], params))
    return tangent, second, rows


def small_config(method: str, pattern: str = "LLLN", **fields) -> models.ModelConfig:
    """Return the config of a small model of `method` with two periods of the pattern of layers, width 32,
    in float32.
    """
    config = models.lm(method, "tiny", vocab_size=VOCAB)
    config.hidden_size, config.pattern, config.num_layers = 32, pattern, 2 * len(pattern)
    for letter, name in (("L", method), ("N", "softmax")):
        config.layers[letter].mixer = mixers.METHODS[name].config.for_width(32)
        if mixers.METHODS[name].forms:
            config.layers[letter].mixer.op.chunk_size = 4
        if hasattr(
            config.layers[letter].mixer, "mini_batch"
        ):  # so that a row has several mini-batches
            config.layers[letter].mixer.mini_batch = 3
        # Rounding errors are amplified by a normaliser if all scores of a query are near 0, by a norm if a
        # head's output is near 0, and by an angle of a number near 0.
        for field, value in (("normalizer_eps", 1.0), ("norm_eps", 1e-2), ("gate_bias", 3.0)):
            if hasattr(config.layers[letter].mixer, field):
                setattr(config.layers[letter].mixer, field, value)
    config.dtype, config.remat, config.init_std = "float32", "none", 0.2
    for name, value in fields.items():
        setattr(config, name, value)
    return config


class Small:
    """A small decoder under `jax.jit` for tests, and tokens [B, T] for it."""

    def __init__(self, config: models.ModelConfig):
        self.config = config
        self.model = models.Decoder(config, rngs=nnx.Rngs(0))
        stir(self.model, kernels_only=True)
        self.tokens = jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 0, VOCAB)
        self.call = jax.jit(lambda model, tokens, **call: model(tokens, **call)[:2])

    def __call__(self, tokens=None, **call):
        """Run the small decoder, under `jax.jit`, on the given tokens (None: its stored random tokens), and
        return (logits, state).
        """
        return self.call(self.model, self.tokens if tokens is None else jnp.asarray(tokens), **call)


@functools.cache
def _small(method: str, pattern: str) -> Small:
    return Small(small_config(method, pattern))


@pytest.fixture
def small(method, pattern):
    return _small(method, pattern)


@pytest.fixture
def gla():
    return _small("gla", "LN")


@pytest.fixture
def plain():
    """Fixture: a small model of linear attention, which is the fastest to compile."""
    return _small("linear_attention", "L")
