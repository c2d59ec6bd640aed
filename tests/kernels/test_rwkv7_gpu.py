"""Tests of the Hopper kernels of RWKV7: run in Mosaic GPU's interpreter, and lowered for an H200."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from lsm_jax import ops
from lsm_jax.ops.backends.select import clear_choices
from lsm_jax.ops.rwkv7 import backends, xla
from pallas_kernels.compat import gpu_interpreter, races_found
from pallas_kernels.rwkv7.cases import INTERPRETED, TOLERANCES, Case
from tests.kernels.test_linear_attention_gpu import error

IN_ROWS = "token_mixes in_rows"  # with the token before of the same row
OPS = ("token_mixes", IN_ROWS, "rwkv7_gates", "rwkv7_output")
KERNELS = {"token_mixes": 1, IN_ROWS: 1, "rwkv7_gates": 2, "rwkv7_output": 2}  # with the gradients'
MIXES = 6
TWICE = (3,)
EPS = 64e-5
_PER_TOKEN = {
    "token_mixes": "x before",
    IN_ROWS: "x",
    "rwkv7_gates": "r k v rate decay",
    "rwkv7_output": "o current gate",
}
_WEIGHTS = {
    "token_mixes": "shares",
    IN_ROWS: "shares",
    "rwkv7_gates": "removal rate_of_key bonus rate_bias decay_bias",
    "rwkv7_output": "scale bias",
}


def is_mixes(op: str) -> bool:
    """Return whether an op of `OPS` is `token_mixes`, with or without the tokens before."""
    return op.startswith("token_mixes")


def definition(op: str, arguments: dict[str, Any]):
    """Return the results of `op` as it is defined."""
    if op == "rwkv7_output":
        return xla.output(**arguments, eps=EPS)
    if is_mixes(op):
        return xla.mixes(**dict(before=None) | arguments, twice=TWICE)
    return xla.gates(**arguments)


def by_kernel(op: str, interpret: Any, arguments: dict[str, Any]):
    """Return the results of `op`, and gradients, by its kernels in their interpreter."""
    if is_mixes(op):
        return backends.mixes_by_kernel(interpret, **arguments, twice=TWICE)
    if op == "rwkv7_gates":
        return backends.gates_by_kernel(interpret, arguments)
    return backends.output_by_kernel(interpret, EPS, arguments)


def by_op(op: str, implementation: str | None, arguments: dict[str, Any]):
    """Return the results of `op` by the backend called `implementation`."""
    options = {"rwkv7_output": dict(eps=EPS), "token_mixes": dict(twice=TWICE)}
    options[IN_ROWS] = dict(twice=TWICE, before=None)
    more: dict[str, Any] = options.get(op, {})
    return getattr(ops, op.split()[0])(**arguments, **more, implementation=implementation)


def make(op: str, case: Case) -> tuple[dict[str, Any], Any]:
    """Return random arguments of `op` by name, and gradients of its results."""
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.normal(size=shape), dtype)

    channels = case.heads * case.channels
    flat = is_mixes(op)
    shape = (*case[:2], channels) if flat else tuple(case)
    of_weights = (MIXES, channels) if flat else tuple(case[2:])
    arguments = {n: normal(*shape) for n in _PER_TOKEN[op].split()}
    for name in {"rate", "decay"} & set(arguments):
        arguments[name] = 2 * arguments[name].astype(jnp.float32)
    arguments |= {n: normal(*of_weights, dtype=jnp.float32) for n in _WEIGHTS[op].split()}
    results = jax.eval_shape(functools.partial(definition, op), arguments)
    return arguments, jax.tree.map(lambda a: normal(*a.shape, dtype=a.dtype), results)


def both(function, arguments, gradients):
    """Return the results of a function of arguments by name, and the gradients of the arguments."""
    results, pull = jax.vjp(function, arguments)
    return results, pull(gradients)[0]


def widened(tree):
    """Return a pytree with every array in float32."""
    return jax.tree.map(lambda a: a.astype(jnp.float32), tree)


def check(op: str, arguments, gradients) -> None:
    """Compare the results of `op` and each gradient by the kernel with those of the definition in float32."""
    got = both(functools.partial(by_kernel, op, gpu_interpreter()), arguments, gradients)
    assert not races_found()
    wide = widened(arguments)
    if is_mixes(op):  # the weights that multiply are rounded
        wide["shares"] = widened(arguments["shares"].astype(jnp.bfloat16))
    wanted = both(functools.partial(definition, op), wide, widened(gradients))
    for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(wanted[0]), strict=True):
        assert error(a, b) < 2 * TOLERANCES["interpreted"]  # XLA's, of several roundings
    for name, gradient in got[1].items():
        assert gradient.dtype == arguments[name].dtype
        assert bool(jnp.isfinite(gradient).all()), name
        assert error(gradient, wanted[1][name]) < TOLERANCES["interpreted"], name


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[pytest.mark.slow] * bool(i), id=c.id)
        for i, c in enumerate(INTERPRETED)
    ],
)
def test_gradients_equal_those_of_the_definition(op, case):
    """Every gradient of the kernel is that of the definition in float32, and there are no races."""
    check(op, *make(op, case))


@pytest.mark.parametrize("case", [Case(2, 16, 8, 64), Case(3, 14, 8, 64)], ids=lambda case: case.id)
def test_rows_and_thread_blocks_may_end_apart(case):
    """The gradient of mixes along rows, whose thread blocks of 16 tokens end with a row or within one."""
    check(IN_ROWS, *make(IN_ROWS, case))


def test_gates_at_their_ends_have_finite_gradients():
    """A rate or decay so large that its sigmoid is 0 or 1, and a key of zeros, give the definition's finite gradients."""
    arguments, gradients = make("rwkv7_gates", INTERPRETED[0])
    ends = jnp.asarray([-200.0, 200.0], jnp.float32)
    for name in ("rate", "decay"):
        arguments[name] = arguments[name].at[..., :2].set(ends)
    arguments["k"] = arguments["k"].at[:, 3].set(0)
    gradients = gradients._replace(a=gradients.a.at[:, 3].set(0), b=gradients.b.at[:, 3].set(0))
    check("rwkv7_gates", arguments, gradients)


def shapes_of(op: str, case: Case) -> tuple[Any, Any]:
    """Return the shapes of a case's arguments of `op` by name, and of gradients of the results."""
    small = make(op, case._replace(batch=1, length=2))

    def full(a):
        tokens = a.shape[:2] == (1, 2) and a.ndim > 2
        shape = (*case[:2], *a.shape[2:]) if tokens else a.shape
        return jax.ShapeDtypeStruct(shape, a.dtype)

    return jax.tree.map(full, small)


def lowered(op: str, case: Case, implementation: str | None) -> str:
    """Return the program for a Hopper GPU of the results and gradients of `op`."""

    def run(*shapes):
        return both(functools.partial(by_op, op, implementation), *shapes)

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(run).trace(*shapes_of(op, case))
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("case", "kernels"),
    [(Case(2, 64, 8, 64), True), (Case(2, 63, 8, 64), False), (Case(2, 64, 4, 64), False)],
    ids=lambda value: getattr(value, "id", value),
)
def test_the_op_selects_it_on_a_hopper_gpu(op, case, kernels):
    """On a Hopper GPU a call that the kernels support is theirs; `ops.choices` says what was chosen."""
    clear_choices()
    assert lowered(op, case, None).count("custom_call @mosaic_gpu") == kernels * KERNELS[op]
    assert ops.choices()[op.split()[0]].startswith("mosaic_gpu on NVIDIA 9.0" if kernels else "xla")


@pytest.mark.parametrize(
    ("op", "case", "wide", "message"),
    [
        ("rwkv7_gates", Case(1, 64, 8, 64), "k", "requires r, k and v in bfloat16, not bfloat16, float32"),
        ("rwkv7_gates", Case(1, 64, 4, 64), "", "requires a multiple of 512 channels in all heads, not 256"),
        ("rwkv7_gates", Case(1, 64, 2, 256), "", "requires heads of 16, 32, 64 or 128 channels, not 256"),
        ("rwkv7_output", Case(1, 64, 8, 64), "o current gate", "requires o, current and gate in bfloat16"),
        ("rwkv7_output", Case(1, 65, 8, 64), "", "requires a multiple of 2 tokens in all rows, not 65"),
        ("rwkv7_output", Case(1, 64, 4, 64), "", "requires a multiple of 512 channels in all heads, not 256"),
        ("token_mixes", Case(1, 64, 8, 64), "x before", "requires x and before in bfloat16"),
        ("token_mixes", Case(1, 64, 4, 64), "", "requires a multiple of 512 channels, not 256"),
        ("token_mixes", Case(1, 63, 8, 64), "", "requires 64 tokens or more, not 63"),
    ],
)  # fmt: skip
def test_names_the_requirement_that_is_not_met(op, case, wide, message):
    arguments, _ = make(op, case)
    for name in wide.split():
        arguments[name] = arguments[name].astype(jnp.float32)
    with pytest.raises(NotImplementedError, match=message):
        by_op(op, "mosaic_gpu", arguments)
