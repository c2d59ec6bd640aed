"""Tests that programs with Triton kernels are lowered, on a CPU, for NVIDIA cards that this machine does not have.

Triton compiles the kernels to PTX code. What jax-triton then makes of that code is in JAX's CUDA plugin, which is not installed here;
`Kernel` and `Call` take its place. `make test-aot` compiles whole programs with the plugin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.gpu_triton
import pytest

from lsm_jax import ops
from pallas_kernels.triton import launch
from tests.kernels import triton_token_ops
from tests.kernels.marks import requires_triton

STRUCT = jax.ShapeDtypeStruct


class Kernel:
    """A compiled kernel: the first arguments of the plugin's `TritonKernel`."""

    def __init__(self, name, warps, ctas, shared, ptx, *_: Any):
        self.name, self.ptx = name, ptx


class Call:
    """A launch of a kernel: the arguments of the plugin's `TritonKernelCall`."""

    def __init__(self, kernel, *grid_and_parameters: Any):
        self.kernel = kernel

    def to_proto(self, name: str, metadata: bytes) -> bytes:
        return name.encode()


@pytest.fixture
def lowered(monkeypatch):
    """A function that lowers a traced program for NVIDIA, and returns its text and the kernels of its Triton calls."""
    kernels: list[Kernel] = []

    def call(kernel, *rest):
        kernels.append(kernel)
        return Call(kernel, *rest)

    parts = dict(TritonKernel=Kernel, TritonKernelCall=call)
    for name in ("create_array_parameter", "create_scalar_parameter"):
        parts[name] = lambda *x: x
    for name, part in parts.items():
        monkeypatch.setattr(jaxlib.gpu_triton, name, part, raising=False)

    def lower(trace: Callable[[], Any], capability: str) -> tuple[str, list[Kernel]]:
        with launch.code_for(capability):
            return trace().lower(lowering_platforms=("cuda",)).as_text(), kernels

    return lower


def both(function: Callable, *arguments: Any) -> Any:
    """Trace a call of an op that returns an output and a state, and all gradients of its output."""

    def gradients(*x):
        output, pull = jax.vjp(lambda *x: function(*x, implementation="triton")[0], *x)
        return output, pull(output)

    return jax.jit(gradients).trace(*arguments)


def memory(op: Callable, decay: str, *others: str, length: int = 130) -> Any:
    """Trace a memory with 64 channels and a decay of each "head" or "channel", and its gradients."""
    shapes = dict(head=(2, length, 2), channel=(2, length, 2, 64))
    wide = STRUCT(shapes["channel"], jnp.bfloat16)
    more = [STRUCT(shapes[x], jnp.float32) if x == "head" else wide for x in others]
    return both(op, wide, wide, wide, *more, STRUCT(shapes[decay], jnp.float32))


def attention() -> Any:
    q, k = STRUCT((2, 300, 4, 64), jnp.bfloat16), STRUCT((2, 300, 2, 64), jnp.bfloat16)

    def gated(q, k, v, log_forget, **options):
        return ops.attention(q, k, v, log_forget=log_forget, **options)

    return both(gated, q, k, k, STRUCT((2, 300, 4), jnp.float32))


PROGRAMS: dict[str, tuple[Callable[[], Any], int]] = {
    # The decays' factors, two scans, outputs, and one kernel for the gradients.
    "scalar decay": (lambda: memory(ops.linear_memory, "head"), 5),
    "one token, delta": (triton_token_ops.COMPILED["one token, delta"], 1),
    # The scores in place of the factors, and the gradients of values, of scores, and of queries, keys and decays.
    "channel decay": (lambda: memory(ops.linear_memory, "channel"), 7),
    "delta rule, scalar decay": (lambda: memory(ops.delta_memory, "head", "head"), 9),
    "delta rule, channel decay": (lambda: memory(ops.delta_memory, "channel", "head"), 9),
    # In parts: also their updates and the memories before them, and both again for the gradients.
    "delta rule, parts": (lambda: memory(ops.delta_memory, "head", "head", length=8192), 13),
    "dplr": (lambda: memory(ops.dplr_memory, "channel", "channel", "channel"), 12),
    "attention": (attention, 3),  # the output, and the gradients of queries and of keys
    # Forward and backward; and the memories before and after the parts of a row, and their gradients.
    "selective, 16, full": (triton_token_ops.COMPILED["selective, 16, full"], 2),
    "selective, 16": (triton_token_ops.COMPILED["selective, 16"], 6),
    "convolution, documents": (triton_token_ops.COMPILED["convolution, documents"], 2),
}
"""How each program is traced, and its number of Triton kernels."""
FAST = ("scalar decay", "one token, delta")


@requires_triton
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in PROGRAMS]
)
def test_every_kernel_of_a_program_is_lowered(name, lowered):
    trace, count = PROGRAMS[name]
    text, kernels = lowered(trace, "8.0")
    assert text.count("custom_call @triton_kernel_call") == len(kernels) == count
    for kernel in kernels:
        assert ".version 8.8" in kernel.ptx and ".target sm_80" in kernel.ptx, kernel.name


@requires_triton
@pytest.mark.parametrize("capability", launch.CAPABILITIES)
def test_kernels_are_lowered_for_the_given_capability(capability, lowered):
    trace, _ = PROGRAMS["one token, delta"]
    _, (kernel,) = lowered(trace, capability)
    assert f".target sm_{capability.replace('.', '')}" in kernel.ptx
