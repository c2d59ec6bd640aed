"""Tests of Mamba-3: the recurrence and complete layers are compared with the authors' code, in values, states and all
gradients, and with simpler methods that they equal in special cases.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import mixers, ops
from lsm_jax.mixers.mamba3 import trapezoid_memory
from lsm_jax.mixers.turns import turn
from tests.mixers import goldens
from tests.mixers.test_mixers import close


def before(x, steps=1):
    """Return x [B, T, ...] moved by `steps` tokens, 0 for the first ones."""
    return jnp.pad(x, [(0, 0), (steps, 0)] + [(0, 0)] * (x.ndim - 2))[:, : x.shape[1]]


def inputs_of(g):
    """Return the arguments of `trapezoid_memory` for the inputs of a golden, by name: one rank without `mimo_x`."""
    heads = g["x"].shape[2]

    def of_heads(x, bias):  # [B, T, (R,) 1, N] and [H, (R,) N] to [B, T, R, H, N]
        x, bias = (x, bias) if x.ndim == 5 else (x[:, :, None], bias[:, None])
        return jnp.repeat(x, heads, axis=3) + jnp.swapaxes(bias, 0, 1)

    k = of_heads(g["B_"], g["B_bias"])
    share = jax.nn.sigmoid(g["trap"])
    weight = share * g["dt"]
    return dict(
        q=of_heads(g["C"], g["C_bias"]), k=k, v=g["x"], k_before=before(k), v_before=before(g["x"]),
        log_decay=g["log_decay"], weight=weight, weight_before=before(weight),
        weight_old=(1 - share) * g["dt"], angle=math.pi * jnp.tanh(g["angle"]) * g["dt"][..., None],
        v_weights=jnp.swapaxes(g["mimo_x"], 0, 1) if "mimo_x" in g else None,
    )  # fmt: skip


def values_of(inputs):
    """Return the values of all ranks [B, T, R, H, P]."""
    weights = inputs["v_weights"]
    return inputs["v"][:, :, None] * (1 if weights is None else weights)


def finals(inputs, state, halves):
    """Return the memory M after the last token and the token's turned keys, as the authors' code returns them."""
    total = jnp.sum(inputs["angle"], axis=1)
    k = inputs["k"][:, -1]
    write = jnp.einsum("bh,brhn,brhp->bhnp", inputs["weight"][:, -1], k, values_of(inputs)[:, -1])
    memory = jnp.swapaxes(state.memory + write, -1, -2)
    memory = turn(memory, total[:, :, None], halves=halves)
    keys = turn(jnp.swapaxes(k, 1, 2), total[:, :, None], halves=halves)
    return dict(final_state=jnp.swapaxes(memory, -1, -2), final_key=keys)


@pytest.mark.parametrize("name", ["mamba3_siso", "mamba3_mimo", "mamba3_mimo_pairwise"])
def test_mamba3_is_the_published_recurrence(name):
    halves = name == "mamba3_mimo"

    def run(g):
        inputs = inputs_of(g)
        y, state = trapezoid_memory(**inputs, halves=halves, skip=g["D"], chunk_size=4)
        z = g["z"][:, :, None]
        if "mimo_z" in g:
            y = y * jax.nn.silu(z * jnp.swapaxes(g["mimo_z"], 0, 1))
            y = y * jnp.swapaxes(g["mimo_o"], 0, 1)
        else:
            y = y * jax.nn.silu(z)
        outputs = dict(y=jnp.sum(y, axis=2)) | finals(inputs, state, halves)
        angle = jnp.sum(inputs["angle"], axis=1)
        if name == "mamba3_siso":
            outputs["final_key"] = outputs["final_key"][:, :, 0]
            angle = jnp.mod(angle, 2 * math.pi)
            outputs["final_value"] = inputs["v"][:, -1]
        else:
            outputs["final_value"] = jnp.swapaxes(values_of(inputs)[:, -1], 1, 2)
        return outputs | dict(final_angle=angle)

    goldens.check(name, run)


@pytest.mark.parametrize("name", ["siso", "siso_norm", "mimo", "mimo_norm"])
def test_released_layers_of_mamba3(name):
    golden = goldens.load(f"layer_mamba3_{name}")
    several = name.startswith("mimo")
    config = mixers.Mamba3Config(
        expand=int(golden["expand"]), head_dim=int(golden["headdim"]), state_size=int(golden["d_state"]),
        mimo_rank=int(golden["rank"]) if several else None, output_norm="norm" in name,
        rope_fraction=float(golden["rope_fraction"]),
    )  # fmt: skip
    heads, keys = config.num_heads(16), config.rank() * config.state_size
    sizes = dict(
        z_proj=32, x_proj=32, b_proj=keys, c_proj=keys, dt_proj=heads, rate_proj=heads,
        trapezoid_proj=heads, angle_proj=config.num_angles(),
    )  # fmt: skip

    def run(g):
        edges = np.cumsum(list(sizes.values()))
        assert edges[-1] == g["in_proj.weight"].shape[0]
        parts = jnp.split(g["in_proj.weight"].T, edges[:-1], axis=1)
        parameters = {f"{n}/kernel": w for n, w in zip(sizes, parts, strict=True)}
        parameters |= {
            "dt_bias": g["dt_bias"], "b_bias": g["B_bias"], "c_bias": g["C_bias"], "skip": g["D"],
            "b_norm/scale": g["B_norm.weight"], "c_norm/scale": g["C_norm.weight"],
            "o_proj/kernel": g["out_proj.weight"].T,
        }  # fmt: skip
        parameters |= {n: g[n] for n in ("mimo_x", "mimo_z", "mimo_o") if n in g}
        if "norm.weight" in g:
            parameters["norm/scale"] = g["norm.weight"].reshape(heads, -1)
        return dict(y=goldens.run_layer(config, 16, parameters, g["x"]))

    goldens.check(f"layer_mamba3_{name}", run, dtypes=["float32"])


@pytest.fixture(scope="module")
def siso():
    golden = goldens.load("mamba3_siso")
    return inputs_of(
        {n: jnp.asarray(a, jnp.float32) for n, a in golden.items() if a.dtype.kind == "f"}
    )


def test_eulers_rule_without_angles_is_mamba2(siso):
    step = siso["weight"] + siso["weight_old"]
    euler = dict(
        weight=step, weight_before=before(step), weight_old=0 * step, angle=0 * siso["angle"]
    )
    y, state = trapezoid_memory(**(siso | euler), halves=False, chunk_size=4)
    q, k, v = siso["q"][:, :, 0], siso["k"][:, :, 0], siso["v"]
    expected, plain = ops.linear_memory(q, k, step[..., None] * v, siso["log_decay"], scale=1.0)
    close(y[:, :, 0], expected, 1e-5)
    last = jnp.einsum("bh,bhn,bhp->bhnp", step[:, -1], k[:, -1], v[:, -1])
    close(state.memory + last, plain.memory, 1e-5)


def test_equal_ranks_are_one(siso):
    y, state = trapezoid_memory(**siso, halves=False, chunk_size=4)
    ranks = {n: jnp.repeat(siso[n], 3, axis=2) for n in ("q", "k", "k_before")}
    ranks["v_weights"] = jnp.full((3, *siso["v"].shape[2:]), 1 / 3)
    again, after = trapezoid_memory(**(siso | ranks), halves=False, chunk_size=4)
    close(jnp.mean(again, axis=2), y[:, :, 0], 1e-5)
    close(after, state, 1e-5)


def test_masked_tokens_read_the_memory_of_the_last_written_token():
    """A token with update mask 0 that has the queries of a token reads what that token read, without the skip."""
    config = dataclasses.replace(mixers.Mamba3Config.for_width(16), mimo_rank=2)
    mixer = mixers.build(config, 16, rngs=nnx.Rngs(0), init_std=0.5)
    x = jax.random.normal(jax.random.key(0), (1, 4, 16))
    x = x.at[:, 3].set(x[:, 2])
    context = mixers.Context(update_mask=jnp.array([[1, 1, 1, 0]]))
    mixer.skip[...] = 0 * mixer.skip[...]
    o = jax.jit(lambda mixer, x: mixer.through_memory(x, context, None)[0])(mixer, x)
    close(o[:, 3], o[:, 2])


@pytest.mark.parametrize("rank", [None, 2])
def test_calls_of_any_length_continue_the_state(rank):
    """The memory's channels have the published order between calls, of tokens fewer or more than the channels of a value."""
    config = dataclasses.replace(mixers.Mamba3Config.for_width(16), mimo_rank=rank)
    mixer = mixers.build(config, 16, rngs=nnx.Rngs(0), init_std=0.5)
    x = jax.random.normal(jax.random.key(0), (2, 13, 16))
    whole, final, _ = mixer(x, state=mixer.init_state(2, 13, jnp.float32))
    assert 1 < config.head_dim < 7
    for cuts in ([1, 2, 9], [7, 8], [10]):
        state, outputs = mixer.init_state(2, 13, jnp.float32), []
        for part in jnp.split(x, cuts, axis=1):
            y, state, _ = mixer(part, state=state)
            outputs.append(y)
        close(jnp.concatenate(outputs, axis=1), whole)
        close(state, final)


def test_padding_inside_a_document_changes_nothing():
    mixer = mixers.build(mixers.Mamba3Config.for_width(16), 16, rngs=nnx.Rngs(0), init_std=0.5)
    x = jax.random.normal(jax.random.key(0), (1, 11, 16))
    ids = jnp.array([[0, 1, 1, 1, 0, 0, 1, 1, 2, 0, 2]])
    real = ids[0] != 0
    run = jax.jit(lambda x, ids: mixer(x, segment_ids=ids)[0])
    close(run(x, ids)[:, real], run(x[:, real], ids[:, real]))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(rate="relu"), "rate='relu': accepted are 'heavy_tail', 'softplus'"),
        (dict(mimo_rank=0), "mimo_rank=0: it must be greater than 0"),
        (dict(state_size=7), "state_size=7: accepted are even numbers"),
        (dict(rope_fraction=1.5), "rope_fraction=1.5: accepted are numbers up to 1"),
        (dict(rope_fraction=0.01), "rope_fraction=0.01: accepted are numbers up to 1"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(mixers.Mamba3Config.for_width(16), **fields).validate(16)
