"""Tests that the residuals of kernels are saved under remat=dots, and the results of short convolutions under
remat=dots_and_convolutions, and are behind barriers, so that no kernel runs twice.
"""

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend import core
from jax.interpreters import partial_eval as pe
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from configs import lm
from lsm_jax import models, ops
from lsm_jax.models.decoder import rematerialized
from lsm_jax.ops.core.saved import saves_memories
from lsm_jax.ops.normalization import branches
from pallas_kernels.short_convolution import short_convolution

KERNEL = "mpmd_map"  # the primitive of a Mosaic GPU kernel
ROWS, HEADS, DIM = (2, 128), 2, 64
# The op, and its arguments after q, k and v: [B, T, H] ("head"), or [B, T, H, K] in float32 ("channel") or bfloat16 ("short").
CASES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "linear": (ops.linear_memory, ("head",)),
    "linear-channels": (ops.linear_memory, ("channel",)),
    "delta": (ops.delta_memory, ("head", "head")),
    "delta-channels": (ops.delta_memory, ("head", "channel")),
    "dplr": (ops.dplr_memory, ("short", "short", "channel")),
    "attention": (lambda q, k, v, g, **o: ops.attention(q, k, v, log_forget=g, **o), ("head",)),
}


def step(case, remat):
    """Return the function that computes the gradient of a loop over three layers, each one call of the op of
    `case`, with rematerialization `remat`, and the shapes of its arguments.
    """
    op, kinds = CASES[case]
    struct, width = jax.ShapeDtypeStruct, HEADS * DIM
    shapes_of = dict(
        head=struct((*ROWS, HEADS), jnp.float32),
        channel=struct((*ROWS, HEADS, DIM), jnp.float32),
        short=struct((*ROWS, HEADS, DIM), jnp.bfloat16),
    )

    def layer(x, weights, rest):
        q, k, v = jnp.moveaxis((x @ weights).reshape(*ROWS, 3, HEADS, DIM), 2, 0)
        return jnp.tanh(op(q, k, v, *rest, implementation="mosaic_gpu")[0]).reshape(x.shape)

    run = rematerialized(layer, remat)

    def total(x, weights, rest):
        x, _ = jax.lax.scan(lambda x, w: (run(x, w, rest), None), x, weights)
        return jnp.sum(x.astype(jnp.float32))

    shapes = struct((*ROWS, width), jnp.bfloat16), struct((3, width, 3 * width), jnp.bfloat16)
    return jax.grad(total, argnums=(0, 1)), (*shapes, tuple(shapes_of[name] for name in kinds))


def traced(function, arguments):
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*arguments)


def equations(jaxpr):
    """Yield each equation of a jaxpr and of the jaxprs inside it, with the equations of the same jaxpr that compute its inputs."""
    sources = {out: equation for equation in jaxpr.eqns for out in equation.outvars}
    for equation in jaxpr.eqns:
        yield equation, [sources.get(v) for v in equation.invars if not isinstance(v, core.Literal)]
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr),
        ):
            if isinstance(inner, core.Jaxpr | core.ClosedJaxpr):
                yield from equations(getattr(inner, "jaxpr", inner))


def kernels(case, remat) -> int:
    """Return the number of kernels in the program that computes the gradient of `case` with rematerialization
    `remat`, after removal of dead code.
    """
    jaxpr = traced(*step(case, remat)).jaxpr.jaxpr
    live, _ = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return sum(equation.primitive.name == KERNEL for equation, _ in equations(live))


@pytest.mark.parametrize("case", CASES)
def test_dots_runs_no_kernel_of_a_memory_or_of_attention_again(case):
    once = kernels(case, "none")
    assert kernels(case, "dots") == once < kernels(case, "full")


@pytest.mark.parametrize("case", CASES)
def test_residuals_that_a_scan_may_stack_are_behind_a_barrier(case):
    named = [
        sources
        for equation, sources in equations(traced(*step(case, "none")).jaxpr.jaxpr)
        if equation.primitive.name == "name" and equation.params["name"] == ops.KEPT
    ]
    assert len(named) >= 2  # the output, and at least one residual
    for (source,) in named:
        assert source is not None and source.primitive.name == "optimization_barrier"


def layer_kernels(method: str, remat: str, *, unrolled: bool = False) -> Counter[str]:
    """Return the number of kernels by name in the program that computes the gradient of a layer of `method`, after removal of dead code;
    the layers of the model are one loop, which is compiled as such or `unrolled`.
    """
    kernels = (
        e.params["name"]
        for e in layer_equations(method, remat, unrolled=unrolled)
        if e.primitive.name == KERNEL
    )
    return Counter(str(name) for name in kernels)


@functools.cache
def layer_equations(method: str, remat: str, *, unrolled: bool = False) -> list:
    """Return the equations of the program of `layer_kernels`, after removal of dead code."""
    config = lm.get_config(f"{method}-340m").model
    config.hidden_size, config.num_layers, config.vocab_size = 512, 2, 256
    config.dtype, config.remat, config.unroll_layers = "bfloat16", remat, unrolled
    graphdef, params = nnx.split(nnx.eval_shape(lambda: models.Decoder(config, rngs=nnx.Rngs(0))))

    def total(params, tokens):
        return jnp.sum(nnx.merge(graphdef, params)(tokens)[0].astype(jnp.float32))

    tokens = jax.ShapeDtypeStruct((4, 128), jnp.int32)
    jaxpr = traced(jax.grad(total), (params, tokens)).jaxpr.jaxpr
    live, _ = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return [equation for equation, _ in equations(live)]


@pytest.mark.parametrize("method", ["mamba2", "gated_deltanet"])
def test_the_convolutions_of_a_layer_run_again_unless_their_results_are_saved(method):
    """With `dots_and_convolutions` the backward pass runs none of a layer's three short convolutions again, and all other kernels as often
    as with `dots`; Mamba2's B and C, of 128 channels each, are kernels too.
    """
    name = "short_convolution_forward"
    again = layer_kernels(method, "dots") - layer_kernels(method, "dots_and_convolutions")
    assert again == {name: 3}
    assert layer_kernels(method, "dots_and_convolutions")[name] == 3


def test_rwkv7s_gates_run_again_unless_their_results_are_saved():
    """With `dots` the backward pass computes RWKV7's gates again, and not its outputs; with `dots_and_convolutions` neither, nor anything
    that `dots` does not.
    """
    once = layer_kernels("rwkv7", "none")
    assert once["rwkv7_gates"] == once["rwkv7_output"] == 1
    assert layer_kernels("rwkv7", "dots") - once == {"rwkv7_gates": 1}
    assert layer_kernels("rwkv7", "dots_and_convolutions") == once


@pytest.mark.parametrize(
    "method", ["softmax", "gla", "gated_deltanet", pytest.param("rwkv7", marks=pytest.mark.slow)]
)
def test_inputs_of_products_are_computed_once_where_they_are_saved(method):
    """With `dots_and_inputs` the backward pass computes no array of that name again, and runs
    no kernel again that `dots_and_convolutions` does not.
    """

    def computed(remat):
        names = [
            e.params["name"] for e in layer_equations(method, remat) if e.primitive.name == "name"
        ]
        return names.count(ops.INPUTS)

    assert computed("dots_and_inputs") == computed("none") < computed("dots_and_convolutions")
    assert layer_kernels(method, "dots_and_inputs") == layer_kernels(
        method, "dots_and_convolutions"
    )


# The cases whose kernels can save the memories before all chunks.
SAVING = ("linear-channels", "delta", "delta-channels", "dplr")


@pytest.mark.parametrize("case", CASES)
def test_the_backward_pass_scans_no_memory_again_that_is_saved(case):
    """With `dots_and_states` there is one kernel less, the second scan of a memory, where the first can save what it computes."""
    assert kernels(case, "dots_and_states") == kernels(case, "dots_and_inputs") - (case in SAVING)


SCANS = dict(gla="linear_attention_channel_scan", gated_deltanet="delta_rule_scan")


@pytest.mark.parametrize("unrolled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", SCANS)
def test_only_dots_and_states_saves_memories(method, unrolled):
    """The layers of a model with `dots_and_states` run one scan less than those of models with any other policy that runs no kernel again,
    whichever of them is traced first in a process; all other kernels are the same.
    """
    layers = 1 + unrolled

    def found(remat):
        layer_equations.cache_clear()  # the caches of jax remain
        return layer_kernels(method, remat, unrolled=unrolled)

    def scans():
        """Return the numbers of results of the scans that `found` found last."""
        equations = layer_equations(method, remat, unrolled=unrolled)
        named = (e for e in equations if e.primitive.name == KERNEL)
        return sorted(len(e.outvars) for e in named if str(e.params["name"]) == SCANS[method])

    # The forward scan returns the output and the last memory, the backward scan also memories, and so does the forward scan again.
    again = {"gla": [2, 2, 3], "gated_deltanet": [2, 3, 3]}[method]
    saved = {"gla": [3, 3], "gated_deltanet": [3, 4]}[method]
    counts = {}
    for remat in ("dots_and_states", "dots_and_inputs", "dots_and_states", "none"):
        count = found(remat)
        assert counts.setdefault(remat, count) == count
        expected = saved if remat == "dots_and_states" else again
        assert scans() == sorted(expected * layers)
    assert counts["dots_and_inputs"] - counts["dots_and_states"] == {SCANS[method]: layers}
    assert not counts["dots_and_states"] - counts["dots_and_inputs"]


def test_policies_without_memories_tell_no_kernel_to_save_them():
    """Within a model with `dots_and_states`, a layer that is rematerialised in another way saves none; ops outside neither."""
    seen = []
    inner = rematerialized(lambda x: seen.append(saves_memories()) or x, "dots")
    outer = rematerialized(lambda x: seen.append(saves_memories()) or inner(x), "dots_and_states")
    jax.make_jaxpr(outer)(1.0)
    assert seen == [True, False]
    assert not saves_memories()


@pytest.mark.parametrize("method", ["softmax", "gla"])
@pytest.mark.parametrize("remat", ["none", "dots", "dots_and_convolutions"])
def test_the_sums_and_norms_of_a_layer_run_once(method, remat):
    """Each of a layer's two sums is computed with its norm by one kernel, which the backward pass does not run again; in a loop and with `full`
    by XLA.
    """
    for unrolled, layers in ((False, 1), (True, 2)):
        found = layer_kernels(method, remat, unrolled=unrolled)
        assert found["residual_norm_forward"] == 2 * layers * unrolled
        assert found["residual_norm_backward"] == 2 * layers
        assert layer_kernels(method, "full", unrolled=unrolled)["residual_norm_forward"] == 0


@pytest.mark.parametrize("saves", [True, False])
def test_a_norm_that_is_not_saved_is_computed_from_the_stream(saves):
    """With the stream saved, and whether or not the norm is saved by its name, the backward pass runs no kernel; a norm that is not
    saved is computed from the stream, and one that is saved is not computed.
    """
    struct = jax.ShapeDtypeStruct
    x, scale = struct((*ROWS, 256), jnp.bfloat16), struct((256,), jnp.float32)

    def layer(x, added, scale, weights):
        x, norms = branches.residual_norm(x, scale, eps=1e-5, count=2, added=added)
        return x, norms[0] @ weights + jnp.sin(norms[1])

    names = [ops.KEPT, ops.INPUTS] if saves else [ops.KEPT]
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def total(*arguments):
        x, y = jax.checkpoint(layer, policy=policy)(*arguments)
        return jnp.sum(x * y).astype(jnp.float32)

    arguments = (x, x, scale, struct((256, 256), jnp.bfloat16))
    jaxpr = traced(jax.grad(total, argnums=(0, 1, 2, 3)), arguments).jaxpr.jaxpr
    live, _ = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    found = [e for e, _ in equations(live)]
    kernels = Counter(e.params["name"] for e in found if e.primitive.name == KERNEL)
    assert kernels == {"residual_norm_forward": 1, "residual_norm_backward": 1}
    inputs = [len(e.invars) for e in found if e.primitive.name == "residual_norm_stored"]
    assert sorted(inputs) == ([4] if saves else [3, 4])


def test_a_convolution_is_behind_a_barrier():
    x = jax.ShapeDtypeStruct((*ROWS, 256), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((4, 256), jnp.float32)

    def forward(x, weight):
        initial = jnp.zeros((ROWS[0], 3, 256), x.dtype)
        call = lambda *a: short_convolution(*a, initial=initial, silu=True)  # noqa: E731
        return jax.vjp(call, x, weight)[0]

    names = [e.primitive.name for e, _ in equations(traced(forward, (x, weight)).jaxpr.jaxpr)]
    assert "optimization_barrier" in names
