"""Tests of the head's products in FP8 in the loss of training: their definition, a model that learns, and what is refused."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import lm
from lsm_jax import models
from lsm_jax.mixers import fp8
from lsm_jax.parallel import make_mesh
from lsm_jax.training import make_program, step
from tests.mixers.test_fp8 import rounded
from tests.models.test_loss import B, T, inputs

D, V = 32, 48


def emulated(hidden, head, labels, mask, count, chunk, cap):
    """Return the loss and the gradients of hidden states and head by numpy in float64, `chunk` tokens of each row at a time."""
    hidden, head, mask = (np.asarray(z, np.float64) for z in (hidden, head, mask))
    hidden, labels = hidden * mask[..., None], np.asarray(labels)
    narrow_head = rounded(head, fp8.FORWARD)
    loss, hidden_grad, head_grad = 0.0, np.zeros_like(hidden), np.zeros_like(head)
    for start in range(0, T, chunk):
        part = np.s_[:, start : start + chunk]
        x, weight = rounded(hidden[part], fp8.FORWARD), mask[part] / count
        logits = x @ narrow_head
        logits = logits if cap is None else cap * np.tanh(logits / cap)
        lse = np.log(np.exp(logits).sum(-1))
        hit = labels[part][..., None] == np.arange(V)
        loss += np.sum(weight * (lse - (logits * hit).sum(-1)))
        error = weight[..., None] * (np.exp(logits - lse[..., None]) - hit)
        # In units of the largest weight, 1 / count.
        error = error * (1 if cap is None else 1 - (logits / cap) ** 2)
        error = rounded(error * count, fp8.BACKWARD) / count
        hidden_grad[part] = error @ narrow_head.T
        head_grad += np.einsum("btd,btv->dv", x, error)
    return loss, hidden_grad, head_grad


@pytest.mark.parametrize(("chunk_size", "cap"), [(8, None), (1000, None), (8, 30.0)])
def test_loss_and_gradients_are_those_of_rounded_numbers(chunk_size, cap):
    hidden, head, labels, mask = inputs(D, V)
    count = float(mask.sum())

    def loss(hidden, head, matmul="fp8"):
        given = dict(chunk_size=chunk_size, cap=cap, matmul=matmul)
        return models.mean_next_token_loss(hidden, head, labels, mask, count, **given)

    value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, head)
    assert [g.dtype for g in grads] == [hidden.dtype, head.dtype]
    chunk = min(T, chunk_size // B)
    expected, *expected_grads = emulated(hidden, head, labels, mask, count, chunk, cap)
    assert float(value) == pytest.approx(expected, rel=1e-6)
    assert float(loss(hidden, head)) == pytest.approx(expected, rel=1e-6)  # without gradients
    plain = jax.grad(lambda *given: loss(*given, "default"), argnums=(0, 1))(hidden, head)
    for found, wanted, exact in zip(grads, expected_grads, plain, strict=True):
        error = np.asarray(found, np.float64) - wanted
        assert np.abs(error).max() < 2e-6 * np.abs(wanted).max()
        relative = np.linalg.norm(wanted - exact) / np.linalg.norm(exact)
        assert 1e-3 < relative < 0.2  # it is FP8
    assert 0 < abs(float(value / loss(hidden, head, "default")) - 1) < 2e-2


def test_three_products_have_operands_of_eight_bits():
    hidden, head, labels, mask = inputs(D, V)

    def loss(hidden, head, matmul):
        hidden = hidden.astype(jnp.bfloat16)
        return models.mean_next_token_loss(hidden, head, labels, mask, 4.0, matmul=matmul)

    def text(matmul):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
        return traced.trace(hidden, head, matmul).lower(lowering_platforms=("cuda",)).as_text()

    plain, narrow = text("default"), text("fp8")
    assert plain.count("dot_general") == narrow.count("dot_general") == 3
    assert "f8E" not in plain and "f8E4M3FN" in narrow and "f8E5M2" in narrow


def small(**fields):
    config = lm.get_config("gated_deltanet-tiny").model
    return dataclasses.replace(config, vocab_size=256, dtype="float32", **fields)


@pytest.mark.slow
def test_a_model_learns_as_without(monkeypatch):
    monkeypatch.setattr(fp8, "LEAST_SIZE", 48)
    text = np.frombuffer(b"a memory of fixed size. " * 40, np.uint8)[:640]
    tokens = jnp.asarray(text.reshape(2, 320), jnp.int32)

    def losses(config, steps=12):
        config.validate()
        graph, params = nnx.split(models.Decoder(config, rngs=nnx.Rngs(0)))

        def loss(params):
            model = nnx.merge(graph, params)
            hidden, _, _ = model.hidden(tokens[:, :-1])
            labels = tokens[:, 1:]
            given = dict(chunk_size=128, matmul=config.head_matmul)
            ones = jnp.ones(labels.shape)
            return models.mean_next_token_loss(
                hidden, model.head(), labels, ones, labels.size, **given
            )

        @jax.jit
        def update(params):
            value, grads = jax.value_and_grad(loss)(params)
            return jax.tree.map(lambda p, g: p - 0.03 * g, params, grads), value

        curve = []
        for _ in range(steps):
            params, value = update(params)
            curve.append(float(value))
        return np.array(curve)

    plain, narrow = losses(small()), losses(small(head_matmul="fp8"))
    assert plain[-1] < plain[0] - 1
    assert 0 < np.abs(narrow / plain - 1).max() < 2e-2


def test_evaluation_and_sampling_are_without():
    assert small(head_matmul="fp8").for_inference() == small().for_inference()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(head_matmul="fp16"), "model.head_matmul='fp16': accepted are default, fp8"),
        (dict(head_matmul="fp8"), "hidden_size=64, vocab_size=256.*accepted are sizes of at least 128"),
        (dict(head_matmul="fp8", hidden_size=128, vocab_size=257), "vocab_size=257.*multiples of 16"),
        (dict(head_matmul="fp8", hidden_size=128, head_bias=True), "head_bias=True.*without head_bias"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(small(), **fields).validate()
    dataclasses.replace(small(), hidden_size=128, head_matmul="fp8").validate()


def test_an_unknown_product_of_the_loss_is_refused():
    with pytest.raises(ValueError, match="matmul='fp16': accepted are default, fp8"):
        models.mean_next_token_loss(*inputs(D, V), 1.0, matmul="fp16")


def test_the_config_reaches_the_training_step(monkeypatch):
    """The head of a training step multiplies in FP8, the head of an evaluation does not."""
    monkeypatch.setattr(fp8, "LEAST_SIZE", 48)
    config = lm.get_config("gated_deltanet-tiny")
    config.model = small(head_matmul="fp8")
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    with jax.set_mesh(mesh):
        program = make_program(config, mesh)
        state = jax.eval_shape(program.init)
        batch = {
            name: jax.ShapeDtypeStruct((2, 64), kind)
            for name, kind in dict(
                tokens=jnp.int32, labels=jnp.int32, loss_mask=jnp.float32
            ).items()
        }
        trained = program.train_step.trace(state, batch, None).lower().as_text()
        evaluated = program.eval_step.trace(state.params, batch).lower().as_text()
    assert "f8E4M3FN" in trained and "f8E5M2" in trained
    assert "f8E" not in evaluated


def test_products_are_not_tritons():
    devices = np.array([SimpleNamespace(platform="gpu")])
    gpu = SimpleNamespace(devices=devices, axis_names=(), shape={})
    options = step.compiler_options(small(head_matmul="fp8"), gpu)
    assert options == {"xla_gpu_enable_triton_gemm": False}
