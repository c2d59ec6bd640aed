"""Tests of optimizers and schedules: their definitions, bit-exact resume, one device and several, memory on paper."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax.models import decay_mask
from lsm_jax.parallel import MeshConfig, batch_sharding, make_mesh
from lsm_jax.training import (
    OptimizerConfig,
    learning_rate,
    make_optimizer,
    make_program,
    read_rows,
    train,
)
from lsm_jax.training.memory_plan import plan
from lsm_jax.training.optimizer import moments_of, muon_matrices, stays_finite
from lsm_jax.training.partition import leaves_of
from tests.training import tiny


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(schedule="linear"), lambda t: 1 - 0.9 * (t - 10) / 90),
        (dict(schedule="wsd", decay_fraction=0.25), lambda t: 1 - 0.9 * max(t - 75, 0) / 25),
        (dict(schedule="wsd", decay_fraction=0.9), lambda t: 1 - 0.9 * (t - 10) / 90),
        (dict(schedule="constant"), lambda t: 1.0),
        (dict(schedule="inverse_sqrt"), lambda t: (10 / (t + 1)) ** 0.5),
        (dict(schedule="cosine"), lambda t: 0.1 + 0.45 * (1 + np.cos(np.pi * (t - 10) / 90))),
    ],
)  # fmt: skip
def test_schedules(tmp_path, changes, expected):
    optimizer = OptimizerConfig(peak_lr=1e-2, warmup_tokens=10 * 256, **changes)
    config = tiny.config(tmp_path, total_tokens=100 * 256, optimizer=optimizer)
    config.validate()
    rates = np.array([learning_rate(config, s) for s in range(100)])
    np.testing.assert_allclose(rates[:10], 1e-3 * np.arange(1, 11), rtol=1e-6)
    np.testing.assert_allclose(rates[10:], [1e-2 * expected(t) for t in range(10, 100)], rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(name="adam"), "optimizer.name='adam': accepted are adamw, lion, muon, adafactor; did you mean 'adamw'"),
        (dict(schedule="WSD"), "optimizer.schedule='WSD': accepted are .*; did you mean 'wsd'"),
        (dict(schedule="wds"), "optimizer.schedule='wds': accepted are cosine, wsd, .*; did you mean 'wsd'"),
        (dict(schedule="inverse_sqrt", warmup_tokens=0), "optimizer.warmup_tokens is 0"),
        (dict(schedule="wsd", decay_fraction=0.9), "optimizer.decay_fraction=0.9: the decay and optimizer.warmup_tokens=512 are"),
        (dict(decay_fraction=0.0), "optimizer.decay_fraction=0.0: it must be in"),
        (dict(momentum=1.0), "optimizer.momentum=1.0: it must be in"),
        (dict(adafactor_decay=0.0), "optimizer.adafactor_decay=0.0: it must be in"),
        (dict(adafactor_clip=0.0), "optimizer.adafactor_clip=0.0: it must be greater than 0"),
        (dict(name="adafactor", adafactor_min_size=1), "optimizer.adafactor_min_size=1: it must be at least 2"),
    ],
)  # fmt: skip
def test_errors_name_the_field(tmp_path, changes, message):
    optimizer = OptimizerConfig(**{"warmup_tokens": 512, **changes})
    with pytest.raises(ValueError, match=message):
        tiny.config(tmp_path, optimizer=optimizer).validate()


def gradients(params, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)


def updates_of(config, steps=3):
    """Return the initial parameters, the gradients of each step, and the last update, which is for a learning rate of 1."""
    mesh = make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        params = jax.tree.map(np.asarray, make_program(config, mesh).init().params)
    optimizer = make_optimizer(config)
    state, grads = optimizer.init(params), [gradients(params, i) for i in range(steps)]
    for g in grads:
        updates, state = jax.jit(optimizer.update)(g, state, params)
    return params, grads, updates


def orthogonalise(x):
    """Newton-Schulz iterations of Muon (Jordan, 2024) for a matrix, in float64."""
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x.T if transposed else x


@pytest.mark.slow
def test_muon_orthogonalises_the_matrices_of_layers(tmp_path):
    optimizer = OptimizerConfig(name="muon", weight_decay=0.0, clip_norm=1e9)
    config = tiny.config(tmp_path, optimizer=optimizer)
    params, grads, updates = updates_of(config)
    adamw = updates_of(tiny.config(tmp_path, optimizer=OptimizerConfig(weight_decay=0.0, clip_norm=1e9)))[2]  # fmt: skip
    matrices = 0
    tree = zip(*map(jax.tree.leaves, (muon_matrices(config), updates, adamw)), strict=True)
    leaves = [jax.tree.leaves(g) for g in grads]
    for i, (matrix, update, other) in enumerate(tree):
        if not matrix:
            np.testing.assert_allclose(update, other, rtol=1e-5, atol=1e-6)
            continue
        matrices += 1
        momentum = np.zeros(update.shape)
        for step, g in enumerate(leaves):
            momentum = 0.95 * momentum + 0.05 * np.asarray(g[i], np.float64)
            corrected = momentum / (1 - 0.95 ** (step + 2))
        nesterov = 0.95 * corrected + 0.05 * np.asarray(g[i], np.float64) / (1 - 0.95**3)
        for layer in range(update.shape[0]):
            wanted = 0.2 * max(update.shape[-2:]) ** 0.5 * orthogonalise(nesterov[layer])
            np.testing.assert_allclose(update[layer], wanted, rtol=2e-3, atol=2e-3)
    assert matrices > 5
    named = muon_matrices(config)
    assert not any(any(jax.tree.leaves(named[name])) for name in set(named) - {"periods"})


@pytest.mark.slow
def test_lion_is_the_sign_of_interpolated_momentum(tmp_path):
    optimizer = OptimizerConfig(name="lion", b1=0.9, b2=0.99, weight_decay=0.1, clip_norm=1e9)
    config = tiny.config(tmp_path, optimizer=optimizer)
    params, grads, updates = updates_of(config)
    leaves = [jax.tree.leaves(g) for g in grads]
    decayed = jax.tree.leaves(decay_mask(config.model))
    for i, (p, update) in enumerate(zip(*map(jax.tree.leaves, (params, updates)), strict=True)):
        momentum = np.zeros(p.shape)
        for g in leaves:
            wanted = np.sign(0.9 * momentum + 0.1 * np.asarray(g[i]))
            momentum = 0.99 * momentum + 0.01 * np.asarray(g[i])
        np.testing.assert_allclose(update, wanted + 0.1 * decayed[i] * p, rtol=1e-5, atol=1e-6)


def adafactor_reference(shape, grads, b1, min_size):
    """Adafactor's last update (Shazeer and Stern 2018, algorithm 4) of one layer's parameter, in float64, from the gradients
    of all steps; without its relative step size, and with an unbiased mean of the updates if b1 is not 0."""
    axes = np.argsort(shape, kind="stable")[-2:] if len(shape) > 1 else ()
    factored = len(axes) == 2 and min(shape[i] for i in axes) >= min_size
    row = column = second = mean = 0.0
    for step, g in enumerate(grads, 1):
        g = np.asarray(g, np.float64)
        decay = 1 - step**-0.8
        squares = g**2 + 1e-30
        if factored:
            small, large = (int(i) for i in axes)
            row = decay * row + (1 - decay) * squares.mean(axis=large, keepdims=True)
            column = decay * column + (1 - decay) * squares.mean(axis=small, keepdims=True)
            second = row * column / row.mean(axis=small, keepdims=True)
        else:
            second = decay * second + (1 - decay) * squares
        update = g / np.sqrt(second)
        update = update / max(1.0, np.sqrt((update**2).mean()) / 0.5)
        mean = b1 * mean + (1 - b1) * update
    return mean / (1 - b1 ** len(grads))


@pytest.mark.parametrize(
    ("b1", "min_size"),
    [(0.0, 8), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(0.9, 8), (0.0, 128)])],
)
def test_adafactor_equals_its_definition(tmp_path, b1, min_size):
    optimizer = OptimizerConfig(
        name="adafactor", b1=b1, adafactor_clip=0.5, adafactor_min_size=min_size, clip_norm=1e9
    )
    config = tiny.config(tmp_path, optimizer=optimizer)
    config.model.num_layers = 4  # two periods, each of which is scaled alone
    config.validate()
    params, grads, updates = updates_of(config)
    found, decayed = leaves_of(updates), leaves_of(decay_mask(config.model))
    by_step = [leaves_of(g) for g in grads]
    for name, p in leaves_of(params).items():
        stacked = name.startswith("periods")
        for layer in range(p.shape[0]) if stacked else [...]:
            given = [np.asarray(g[name])[layer] for g in by_step]
            wanted = adafactor_reference(given[0].shape, given, b1, min_size)
            wanted = wanted + 0.1 * decayed[name] * p[layer]
            np.testing.assert_allclose(found[name][layer], wanted, rtol=1e-4, atol=1e-5)


def test_adafactor_stores_rows_and_columns(tmp_path):
    optimizer = OptimizerConfig(name="adafactor", b1=0.0, adafactor_min_size=16)
    config = tiny.config(tmp_path, optimizer=optimizer)
    params = updates_of(config, steps=1)[0]
    numbers = sum(x.size for x in jax.tree.leaves(make_optimizer(config).init(params)))
    all_params = sum(x.size for x in jax.tree.leaves(params))
    assert numbers < 0.35 * all_params
    # The planner counts the same, but for the counters and the placeholders of absent arrays, of one number each.
    counted = sum(
        count * params_leaf.size
        for count, params_leaf in zip(
            moments_of(config).values(), leaves_of(params).values(), strict=True
        )
    )
    placeholders = 2 * len(leaves_of(params))
    assert 0 <= numbers - counted <= placeholders + 1
    with pytest.raises(ValueError, match="adafactor_min_size=2: it must be greater than the number of periods"):  # fmt: skip
        optimizer = OptimizerConfig(name="adafactor", adafactor_min_size=2)
        config = tiny.config(tmp_path, optimizer=optimizer)
        config.model.num_layers = 4
        config.validate()


@pytest.mark.parametrize(
    "name",
    ["lion", "muon", "adafactor"],
)
@pytest.mark.slow
def test_a_resumed_run_is_equal_to_the_bit(tmp_path, name):
    def config():
        optimizer = OptimizerConfig(
            name=name, schedule="wsd", peak_lr=3e-3, warmup_tokens=512, adafactor_min_size=16
        )
        return tiny.config(text, optimizer=optimizer, total_tokens=8 * 256)

    def losses(run):
        return [row["train/loss"] for row in read_rows(tmp_path / run / "metrics.jsonl")]

    text = tiny.write_text(tmp_path / "text")
    train(config(), tmp_path / "whole")
    assert train(config(), tmp_path / "parts", on_report=tiny.stop_at(3)).step < 8
    assert train(config(), tmp_path / "parts").step == 8
    assert losses("parts") == losses("whole")
    assert losses("whole")[-1] < losses("whole")[0] - 0.1


SHARDED = """
import sys
from tests.training.test_optimizer import losses_after_four_steps
print(*losses_after_four_steps(sys.argv[1], fsdp=2, tensor=int(sys.argv[2])))
"""


def losses_after_four_steps(name, **mesh_sizes):
    """Return the losses of the tiny model in the fourth step of an optimizer, and of its average after it, on all devices of
    this process."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, size=(8, 33))
    batch = dict(
        tokens=tokens[:, :-1].astype(np.int32),
        labels=tokens[:, 1:].astype(np.int32),
        loss_mask=np.ones((8, 32), np.float32),
    )
    optimizer = OptimizerConfig(name=name, peak_lr=1e-2, adafactor_min_size=16)
    config = tiny.config("", optimizer=optimizer, ema_decay=0.9)
    config.mesh = MeshConfig(**mesh_sizes)
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        program = make_program(config, mesh)
        state, rows = program.init(), jax.device_put(batch, batch_sharding(mesh))
        for _ in range(4):
            state, metrics = program.train_step(state, rows)
        nll, tokens, _ = program.eval_step(state.ema, rows)
    for wanted, array in zip(*map(jax.tree.leaves, (program.shardings, state)), strict=True):
        assert array.sharding.is_equivalent_to(wanted, array.ndim)
    return [float(metrics["train/loss"]), float(nll.sum() / tokens.sum())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tensor"),
    [("adamw", 1), ("lion", 1), ("muon", 1), ("adafactor", 1), ("adafactor", 2)],
)
def test_a_sharded_optimizer_is_that_of_one_device(name, tensor):
    devices = 2 * tensor
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, "-c", SHARDED, name, str(tensor)],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(number) for number in done.stdout.split()]
    np.testing.assert_allclose(losses, losses_after_four_steps(name), rtol=1e-5)


@pytest.mark.slow
def test_the_planner_counts_the_moments(tmp_path):
    sizes = {}
    for name in ("adamw", "lion", "muon", "adafactor"):
        made = plan(tiny.config(tmp_path, optimizer=OptimizerConfig(name=name)), 1)
        sizes[name] = made.optimizer / made.parameters
    assert sizes["adamw"] == 2 and sizes["lion"] == 1 and 1 < sizes["muon"] < 2
    assert sizes["adafactor"] == 2  # none of the tiny matrices has 128 rows
    average = plan(tiny.config(tmp_path, ema_decay=0.9), 1)
    assert average.optimizer == 3 * average.parameters


@pytest.mark.parametrize(
    ("changes", "stays"),
    [
        ({}, True),
        (dict(name="lion"), True),
        (dict(name="muon"), False),
        (dict(name="adafactor"), False),
        (dict(eps=1e-38), False),
        (dict(peak_lr=1e25), False),
        (dict(end_lr_ratio=1e26), False),
        (dict(b1=1 - 1e-9), False),
        (dict(peak_lr=0.1, weight_decay=11.0), False),
        (dict(eps=1e-39, clip_norm=1e-6), False),
        (dict(name="lion", clip_norm=1e-42), False),
    ],
)
def test_which_optimizers_keep_parameters_finite(tmp_path, changes, stays):
    config = tiny.config(tmp_path, optimizer=OptimizerConfig(**changes))
    config.validate()
    assert stays_finite(config) is stays


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_parameters_stay_finite_whatever_the_gradients(tmp_path, name):
    """Gradients of up to the largest finite norm, then of denormal numbers and zeros: no update exceeds its bound."""
    config = tiny.config(
        tmp_path, optimizer=OptimizerConfig(name=name, clip_norm=1e3, weight_decay=0.0)
    )
    mesh = make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        params = jax.tree.map(np.asarray, make_program(config, mesh).init().params)
    optimizer = make_optimizer(config)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    bound = 1e3 / config.optimizer.eps if name == "adamw" else 1.0
    for seed, exponent in enumerate((17, -30, 16, -44, 5, -300, -300, 17)):
        grads = jax.tree.map(lambda g, e=exponent: g * np.float32(10.0**e), gradients(params, seed))
        updates, state = update(grads, state, params)
        for x in jax.tree.leaves(updates):
            assert np.isfinite(x).all() and np.abs(x).max() <= bound


@pytest.mark.parametrize(
    ("changes", "mask"),
    [(dict(peak_lr=1e39), 1), (dict(b1=1 - 1e-9), 1), (dict(eps=1e-39, clip_norm=1e-6), 0)],
)
def test_a_step_to_parameters_that_are_not_finite_is_skipped(tmp_path, changes, mask):
    """Without a predicted token all gradients are 0, and `eps` is 0 where denormal numbers are."""
    config = tiny.config(tmp_path, optimizer=OptimizerConfig(**changes))
    assert not stays_finite(config)
    mesh = make_mesh(MeshConfig())
    tokens = jnp.ones((config.batch_size, 32), jnp.int32)
    with jax.set_mesh(mesh):
        program = make_program(config, mesh)
        before = jax.tree.map(np.asarray, program.init())
        loss_mask = jnp.full(tokens.shape, mask, jnp.float32)
        batch = dict(tokens=tokens, labels=tokens, loss_mask=loss_mask)
        after, metrics = program.train_step(program.init(), batch)
    assert int(metrics["train/skipped_steps"]) == 1 and np.isfinite(metrics["train/loss"])
    for old, new in zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True):
        np.testing.assert_array_equal(old, new)
