"""What kernels leave for their backward: kept under remat=dots, and behind barriers, so that no kernel runs twice."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core
from jax.interpreters import partial_eval as pe
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from lsm_jax import ops
from lsm_jax.models.decoder import rematerialized
from pallas_kernels.short_convolution import short_convolution

KERNEL = "mpmd_map"  # what a Mosaic GPU kernel is traced to
ROWS, HEADS, DIM = (2, 128), 2, 64
# The op, and what it is given beside q, k and v: one a head ("head"), or one a channel.
CASES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "linear": (ops.linear_memory, ("head",)),
    "linear-channels": (ops.linear_memory, ("channel",)),
    "delta": (ops.delta_memory, ("head", "head")),
    "delta-channels": (ops.delta_memory, ("head", "channel")),
    "dplr": (ops.dplr_memory, ("short", "short", "channel")),
    "attention": (lambda q, k, v, g, **o: ops.attention(q, k, v, log_forget=g, **o), ("head",)),
}


def step(case, remat):
    """The gradient of three layers of one op, scanned, and its arguments' shapes."""
    op, more = CASES[case]
    struct, width = jax.ShapeDtypeStruct, HEADS * DIM
    kinds = dict(
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
    return jax.grad(total, argnums=(0, 1)), (*shapes, tuple(kinds[name] for name in more))


def traced(function, arguments):
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*arguments)


def equations(jaxpr):
    """(equation, those that made its inputs where it stands), of a jaxpr and all within."""
    made = {out: equation for equation in jaxpr.eqns for out in equation.outvars}
    for equation in jaxpr.eqns:
        yield equation, [made.get(v) for v in equation.invars if not isinstance(v, core.Literal)]
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr),
        ):
            if isinstance(inner, core.Jaxpr | core.ClosedJaxpr):
                yield from equations(getattr(inner, "jaxpr", inner))


def kernels(case, remat) -> int:
    """In the program that gradient and rematerialization leave, without what nothing reads."""
    jaxpr = traced(*step(case, remat)).jaxpr.jaxpr
    live, _ = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return sum(equation.primitive.name == KERNEL for equation, _ in equations(live))


@pytest.mark.parametrize("case", CASES)
def test_dots_runs_no_kernel_of_a_memory_or_of_attention_again(case):
    once = kernels(case, "none")
    assert kernels(case, "dots") == once < kernels(case, "full")


@pytest.mark.parametrize("case", CASES)
def test_what_a_scan_may_stack_of_a_kernel_is_behind_a_barrier(case):
    named = [
        sources
        for equation, sources in equations(traced(*step(case, "none")).jaxpr.jaxpr)
        if equation.primitive.name == "name" and equation.params["name"] == ops.KEPT
    ]
    assert len(named) >= 2  # the output, and something that the backward takes
    for (source,) in named:
        assert source is not None and source.primitive.name == "optimization_barrier"


def test_a_convolution_is_behind_a_barrier():
    x = jax.ShapeDtypeStruct((*ROWS, 256), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((4, 256), jnp.float32)

    def forward(x, weight):
        initial = jnp.zeros((ROWS[0], 3, 256), x.dtype)
        call = lambda *a: short_convolution(*a, initial=initial, silu=True)  # noqa: E731
        return jax.vjp(call, x, weight)[0]

    found = [e.primitive.name for e, _ in equations(traced(forward, (x, weight)).jaxpr.jaxpr)]
    assert "optimization_barrier" in found
