"""Tests of experts that multiply in 8-bit floats: beside the definition, in few tokens, in training on text, and without FP8 in inference."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import linear_moe
from lsm_jax.data import DataConfig, write_demo_store
from lsm_jax.feedforward import MoEConfig
from lsm_jax.models import ModelConfig
from lsm_jax.training import read_rows, train
from tests.feedforward.test_moe import X, both, choices, forward, made, oracle


def distance(found, wanted) -> float:
    """Return the norm of the difference of two arrays, relative to the norm of the second one."""
    found, wanted = (np.asarray(a, np.float64).ravel() for a in (found, wanted))
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_values_and_gradients_are_near_the_definitions(activation):
    """The router is not in FP8, so that tokens choose the same experts; outputs and gradients differ as 8-bit floats do."""
    moe = made(matmul="fp8", activation=activation, shared_size=3)
    run = jax.jit(jax.grad(both, argnums=(0, 1), has_aux=True))
    grads, (y, losses, _) = run(moe, X)
    wanted, (exact, known) = oracle(moe, X, jnp.asarray(choices(moe, X)))
    np.testing.assert_allclose(losses, known, rtol=1e-5)
    assert 1e-3 < distance(y, exact) < 8e-2
    pairs = jax.tree_util.tree_leaves_with_path((grads, wanted[0]))
    assert len(pairs) > 8
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(wanted), strict=True
    ):
        name = jax.tree_util.keystr(path)
        # e5m2 has two bits behind the point: half of its steps are up to 12 % of a number.
        assert distance(a, b) < 0.2, name
        if "shared" not in name:
            assert distance(a, b) > 1e-4, name


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_few_tokens_are_multiplied_in_fp8_too(activation):
    """Four choices of six experts, which other products would compute with copies of matrices."""
    narrow = forward(made(matmul="fp8", activation=activation), X[:1, :2])
    plain = forward(made(activation=activation), X[:1, :2])
    assert 1e-3 < distance(narrow, plain) < 8e-2


def test_padding_changes_no_scale():
    moe = made(matmul="fp8")
    ids = jnp.ones(X.shape[:2], jnp.int32).at[:, 8:].set(0)
    run = jax.jit(lambda x: moe(x, segment_ids=ids)[0])
    np.testing.assert_array_equal(run(X), run(X.at[:, 8:].mul(1e4)))


def test_inference_has_no_fp8():
    model = config("fp8").model
    assert model.for_inference() == config("default").model.for_inference()
    assert all(x.feedforward.matmul == "fp8" for x in model.layers.values())
    assert MoEConfig(matmul="fp8").for_inference() == MoEConfig()
    # The option of dense layers changes no expert.
    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(ModelConfig)}
    dense = ModelConfig(**fields | dict(layers=config("default").model.layers, matmul="fp8"))
    assert all(x.feedforward.matmul == "default" for x in dense.layers.values())


def config(matmul: str, path: str = "", steps: int = 20):
    """Return the config of a small model with experts that trains on text in `path`."""
    made = linear_moe.get_config("tiny")
    layers = {
        name: dataclasses.replace(layer, feedforward=dataclasses.replace(layer.feedforward, matmul=matmul))
        for name, layer in made.model.layers.items()
    }  # fmt: skip
    model = dataclasses.replace(made.model, layers=layers, num_layers=2, remat="dots")
    data = DataConfig(path=path, sequence_length=64, num_threads=0)
    optimizer = dataclasses.replace(made.optimizer, warmup_tokens=2 * 8 * 64)
    return dataclasses.replace(
        made, model=model, data=data, optimizer=optimizer, batch_size=8, total_tokens=steps * 8 * 64, log_every=1, eval_every=0, checkpoint_every=100
    )  # fmt: skip


@pytest.mark.slow
def test_a_model_learns_text_as_without(tmp_path):
    """Losses of each of 20 steps on the demo's text are near those of the same model without FP8, and not equal to them."""
    write_demo_store(tmp_path / "text", row_length=64, max_bytes=150_000)
    curves = []
    for matmul in ("default", "fp8"):
        train(config(matmul, str(tmp_path / "text")), tmp_path / matmul)
        rows = read_rows(tmp_path / matmul / "metrics.jsonl")
        curves.append(np.array([row["train/loss"] for row in rows if "train/loss" in row]))
    plain, narrow = curves
    assert len(plain) == 20 and plain[-1] < plain[0] - 0.5
    assert 0 < np.abs(narrow / plain - 1).max() < 3e-3
