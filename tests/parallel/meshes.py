"""Compare a training step on a mesh with one on one device: the loss, the statistics and every gradient.

Tests run it in a process of eight devices: `python -m tests.parallel.meshes PATTERN:axis=size,... ...`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
import time

import jax
import numpy as np

from lsm_jax import mixers, models
from lsm_jax.data import DataConfig
from lsm_jax.feedforward import MoEConfig, SwiGLUConfig
from lsm_jax.models import block
from lsm_jax.parallel import AXES, MeshConfig, make_mesh, place_batch, token_sharding
from lsm_jax.training import OptimizerConfig, TrainConfig
from lsm_jax.training.step import make_program

WIDTH, HEADS = 16, 4
EXPERTS = MoEConfig(num_experts=4, top_k=2, expert_size=8, shared_size=4, z_scale=1e-3)  # fmt: skip


def mixer(name: str, **fields):
    """Return the config of the mixer of a method at width 16, with four heads if it has heads.

    TTT has two, since its norms over four channels would amplify rounding errors a thousandfold. "mom" is a
    Mixture-of-Memories with one balance loss for all layers.
    """
    if name == "mom":
        return mixers.MoMConfig(mixer=mixer("linear_attention"), balance="model", balance_scale=1.0)
    config = mixers.get_method(name).config.for_width(WIDTH)
    known = {f.name for f in dataclasses.fields(config)}
    heads = 2 if name.startswith("ttt") else HEADS
    small = dict(num_heads=heads, head_dim=WIDTH // HEADS, num_groups=HEADS, op=mixers.OpConfig(chunk_size=8), mini_batch=8, state_size=4)  # fmt: skip
    return dataclasses.replace(config, **{k: v for k, v in small.items() if k in known} | fields)


def run_of(pattern: str, **changes) -> TrainConfig:
    """Return the training config of a model with four layers, on rows of 16 tokens.

    `pattern` names the layers of a period, separated by `/`: `MIXER` (with SwiGLU), `MIXER+moe` or
    `MIXER+none`. Fields of the model's config may follow, as in `MIXER@num_layers=8@remat=full`.
    """
    pattern, *given = pattern.split("@")
    names = pattern.split("/")
    layers = {}
    for letter, name in zip("ABCD", names, strict=False):
        method, _, inner = name.partition("+")
        feedforward = {"moe": EXPERTS, "none": None, "": SwiGLUConfig(intermediate_size=24)}[inner]
        layers[letter] = models.LayerConfig(mixer=mixer(method), feedforward=feedforward)
    model = models.ModelConfig(
        vocab_size=32, hidden_size=WIDTH, num_layers=4, pattern="".join(layers), layers=layers,
        dtype="float32", init_std=0.2, remat="none", loss_chunk_size=64,
    )  # fmt: skip
    for name, value in (field.split("=") for field in given):
        setattr(model, name, type(getattr(model, name))(value))
    fields = dict(
        name="meshes", model=model, data=DataConfig(sequence_length=16), batch_size=8, total_tokens=10**5,
        optimizer=OptimizerConfig(clip_norm=1e9, weight_decay=0.0),
    )  # fmt: skip
    return TrainConfig(**fields | changes)


def batch(vocab: int = 32) -> dict[str, np.ndarray]:
    """Return a training batch of eight rows of 16 tokens, with packed documents and some padding."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab, size=(8, 17)).astype(np.int32)
    ids = np.ones((8, 16), np.int32)
    for row, cut in enumerate(rng.integers(2, 15, size=8)):
        ids[row, cut:] = 2
    ids[-1, -3:] = 0
    return dict(
        tokens=tokens[:, :-1], labels=tokens[:, 1:], segment_ids=ids, loss_mask=(ids != 0).astype(np.float32)
    )  # fmt: skip


def regrouped(rows: dict[str, np.ndarray], stages: int, pieces: int) -> dict[str, np.ndarray]:
    """Return a training batch with its rows reordered so that the pieces of gradient accumulation on one
    device have the same rows as the microbatches of a pipeline.
    """
    order = np.arange(8).reshape(
        stages, -1, pieces // stages
    )  # stage, row, microbatch of that stage
    order = order.transpose(1, 0, 2).reshape(-1)
    return {name: x[order] for name, x in rows.items()}


def step(config: TrainConfig, mesh, rows, params=None):
    """Take one training step on a mesh; returns (parameters before it, a tenth of the gradients, metrics).

    The tenth of the gradients is AdamW's first moment after the step.
    """
    with jax.set_mesh(mesh):
        program = make_program(config, mesh)
        if params is None:
            state = program.init()
        else:  # without compiling `init`; all values except the parameters are 0 at first
            zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(program.init))
            zeros = dataclasses.replace(zeros, params=params)
            state = jax.device_put(zeros, program.shardings)
        before = jax.tree.map(np.asarray, state.params)
        state, metrics = program.train_step(state, place_batch(rows, token_sharding(mesh), 8))
    mu = jax.tree.map(np.asarray, state.opt_state[1].mu)
    return before, mu, jax.tree.map(np.asarray, metrics)


def compare(name: str, got, expected, tolerance: float = 1e-4) -> None:
    """Assert that the arrays of two trees are close.

    The tolerance of a leaf is relative to its largest entry, or to 1/100 of the largest entry of all leaves
    if that is larger.
    """
    leaves = jax.tree.leaves(expected)
    floor = 1e-2 * max(np.max(np.abs(x)) for x in leaves)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), leaves, strict=True):
        size = max(np.max(np.abs(b)), floor)
        message = f"{name}: {jax.tree_util.keystr(path)}"
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * size, err_msg=message)


@functools.cache
def alone(pattern: str, stages: int, pieces: int):
    """Take one training step on a single device, with the batch cut into as many pieces for gradient
    accumulation as the pipeline has microbatches. Return (parameters before the step, a tenth of the
    gradients, metrics).
    """
    one = make_mesh(MeshConfig(), jax.devices()[:1])
    return step(run_of(pattern, accumulation_steps=pieces), one, regrouped(batch(), stages, pieces))


def check_narrow(pattern: str, mesh: MeshConfig) -> None:
    """Assert that a training step in bfloat16, the trainer's default, is the same on the mesh as on one
    device.
    """
    params, _, _ = alone(pattern, mesh.pipeline, mesh.pieces())
    one = make_mesh(MeshConfig(), jax.devices()[:1])
    config = run_of(pattern, accumulation_steps=mesh.pieces())
    many = run_of(pattern, mesh=mesh)
    config.model.dtype = many.model.dtype = "bfloat16"
    rows = regrouped(batch(), mesh.pipeline, mesh.pieces())
    _, gradient, metrics = step(config, one, rows, params)
    _, other, more = step(many, make_mesh(mesh, jax.devices()), batch(), params)
    np.testing.assert_allclose(more["train/loss"], metrics["train/loss"], rtol=2e-3)
    square, error = (
        sum(float(np.sum(x**2)) for x in jax.tree.leaves(tree))
        for tree in (gradient, jax.tree.map(np.subtract, other, gradient))
    )
    assert error < 0.1**2 * square, (error, square)


def check(pattern: str, mesh: MeshConfig) -> None:
    """Assert that a training step in float32 is the same on the mesh as on one device."""
    params, gradient, metrics = alone(pattern, mesh.pipeline, mesh.pieces())
    devices = math.prod(getattr(mesh, axis) for axis in AXES)
    many = make_mesh(mesh, jax.devices()[:devices])
    _, other, more = step(run_of(pattern, mesh=mesh), many, batch(), params)
    compare(f"{pattern} {mesh}", other, gradient)
    assert more.pop("moe/overflow_count", 0) == 0
    assert metrics.keys() == more.keys(), (metrics.keys(), more.keys())
    for key in metrics:
        np.testing.assert_allclose(more[key], metrics[key], rtol=2e-5, atol=1e-6, err_msg=key)


def main(*cases: str) -> None:
    """Check that a training step is the same on a mesh as on one device, for cases PATTERN:axis=size,... or
    bfloat16:PATTERN:axis=size,...; with `norms` first, with layers whose gradient and the residual stream's are computed together.
    """
    if cases[0] == "norms":
        block.fuses_gradient = lambda x: True
        cases = cases[1:]
    if any(case.startswith("bfloat16:") for case in cases):
        # Otherwise one program rounds to bfloat16 where the other does not, which changes tiny models a lot.
        os.environ["XLA_FLAGS"] += " --xla_allow_excess_precision=false"
    for case in cases:
        narrow = case.startswith("bfloat16:")
        pattern, _, axes = case.removeprefix("bfloat16:").partition(":")
        sizes = {name: int(size) for name, size in (a.split("=") for a in axes.split(","))}
        began = time.perf_counter()
        (check_narrow if narrow else check)(pattern, MeshConfig(**dict(data=1) | sizes))
        print(f"{case} ok, {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
