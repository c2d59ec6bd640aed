"""Tests that the all-gather of updates, which devices that share a row need (LASP-2), can run at the same
time as the fused kernel of `linear_memory`: neither reads a result of the other.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Var, jaxprs_in_params
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from lsm_jax import ops
from lsm_jax.parallel import AXES, GATHERED
from tests.parallel.test_sequence import ran

CASES = (
    "4:linear_memory-constant_decay:masked",
    "2:linear_memory-decay-bonus:documents",
    "4:linear_memory-key_decay-bonus-heads212:state",
    "8:linear_memory-key_decay-value_decay-heads412:documents",
)
KERNEL = "mpmd_map"  # the primitive of a kernel on Mosaic GPU
MORE = (
    "8:linear_memory:plain",
    "2:linear_memory-key_decay-heads112:masked",
    "4:linear_memory-value_decay:state",
    "2x2:linear_memory-decay-value_decay:state",
    "4:linear_memory-constant_decay:state",
    "2:linear_memory-key_decay-value_decay-heads412:plain",
)
H200S = AbstractMesh(
    tuple(4 if axis == "sequence" else 1 for axis in AXES),
    AXES,
    axis_types=(AxisType.Auto,) * len(AXES),
    abstract_device=AbstractDevice("NVIDIA H200", None, platform="gpu"),
)
DECAYS = {
    "none": {},
    "constant": {"log_decay": (4,)},
    "scalar": {"log_decay": (1, 1024, 4)},
    "channel": {"log_decay": (1, 1024, 4, 64)},
    "value": {"value_log_decay": (1, 1024, 4, 64)},
    "bonus": {"log_decay": (1, 1024, 4, 64), "bonus": (4, 64)},
}


@pytest.mark.slow
def test_values_and_gradients():
    """`linear_memory` on shared rows has the values and gradients of one device, with documents, masks,
    initial states, shared heads and a bonus, and with decays of any strength. Outputs do not depend on
    later tokens, to the last bit.
    """
    ran("sequence_overlap", *CASES, "strong", "later")


@pytest.mark.slow
def test_values_and_gradients_of_more_decays():
    ran("sequence_overlap", *MORE)


def primitives(equation) -> set[str]:
    """Return the names of the primitives of an equation of a jaxpr and of all equations in the jaxprs
    inside it.
    """
    inner = (primitives(x) for jaxpr in jaxprs_in_params(equation.params) for x in jaxpr.eqns)
    return {equation.primitive.name}.union(*inner)


def mapped_bodies(jaxpr) -> list:
    """Return the jaxprs inside all `jax.shard_map` calls of a jaxpr."""
    bodies = []
    for equation in jaxpr.eqns:
        inner = list(jaxprs_in_params(equation.params))
        is_map = equation.primitive.name == "shard_map"
        bodies += inner if is_map else [body for x in inner for body in mapped_bodies(x)]
    return bodies


def results_of(body, name: str) -> set:
    """Return the variables of the jaxpr `body` that depend, directly or not, on an equation of `body` that is
    or contains the primitive called `name`.
    """
    reached = set()
    for equation in body.eqns:
        reads = reached.intersection(x for x in equation.invars if isinstance(x, Var))
        if reads or name in primitives(equation):
            reached.update(equation.outvars)
    return reached


def is_independent(body, name: str, other: str) -> bool:
    """Return whether no equation of the jaxpr `body` with the primitive `name` reads a result that depends on
    the primitive `other`; both primitives must occur in it.
    """
    results = results_of(body, other)
    equations = [x for x in body.eqns if name in primitives(x)]
    assert equations and results, (name, other)
    read = {x for equation in equations for x in equation.invars if isinstance(x, Var)}
    return not read & results


def gradient_of(op: str, given: dict[str, tuple], *, remat: bool = False) -> list:
    """Return the jaxprs inside the `jax.shard_map` calls of an op's forward and backward pass, for a row
    shared by four H200s; with `remat`, the op is rematerialized except for gathered updates.
    """
    qkv = {name: jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.bfloat16) for name in "qkv"}
    more = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in given.items()}

    def run(arrays):
        return getattr(ops, op)(**arrays)[0]

    if remat:
        run = jax.checkpoint(run, policy=jax.checkpoint_policies.save_only_these_names(GATHERED))

    def loss(arrays):
        return jnp.sum(jnp.sin(run(arrays).astype(jnp.float32)))

    with use_abstract_mesh(H200S):
        return mapped_bodies(jax.make_jaxpr(jax.grad(loss))(qkv | more).jaxpr)


@pytest.mark.parametrize("decay", DECAYS)
def test_the_kernel_does_not_wait_for_the_gather(decay):
    """In the forward and the backward pass of `linear_memory` on shared rows, neither the fused kernel nor
    the gather of updates depends on the other.
    """
    bodies = gradient_of("linear_memory", DECAYS[decay])
    assert len(bodies) == 2
    for body in bodies:
        assert sum("all_gather" in primitives(x) for x in body.eqns) == 1
        assert is_independent(body, KERNEL, "all_gather")
        assert is_independent(body, "all_gather", KERNEL)


def test_rematerialization_does_not_gather_again():
    bodies = gradient_of("linear_memory", DECAYS["channel"], remat=True)
    gathers = [sum("all_gather" in primitives(x) for x in body.eqns) for body in bodies]
    assert sum(gathers) == 2, gathers


def test_the_gather_of_a_delta_rule_waits_for_the_kernel():
    """On rows divided over devices, the kernel of a delta rule computes the update that the all-gather sends,
    so the all-gather depends on the kernel. In the forward pass the kernel does not depend on the
    all-gather.
    """
    forward = gradient_of("delta_memory", {"beta": (1, 1024, 4)})[0]
    assert is_independent(forward, KERNEL, "all_gather")
    assert not is_independent(forward, "all_gather", KERNEL)
