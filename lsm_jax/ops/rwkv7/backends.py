"""The backends of `token_mixes`, `rwkv7_gates` and `rwkv7_output`: fused kernels for Hopper, which compute the gradients, and XLA.

XLA's forward passes read and write little more than kernels would; its backward passes read and write several times as much,
because sums over channels and over tokens divide them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lsm_jax.ops.backends.registry import PALLAS, Backend, Call, register
from lsm_jax.ops.rwkv7 import xla
from lsm_jax.ops.rwkv7.xla import RWKV7Gates
from pallas_kernels.requirements import Requirement

_MIN_TOKENS = 64

REQUIREMENTS = (
    Requirement(
        f"{_MIN_TOKENS} tokens or more",
        lambda call: call.length >= _MIN_TOKENS,
        lambda call: str(call.length),
    ),
    *PALLAS,
)


class OutputOptions(NamedTuple):
    """The options of `rwkv7_output` that are constant when a program is compiled.

    Attributes:
        eps: added to the variance of a head.
    """

    eps: float


def _kernel(name: str) -> Any:
    # Imported here, so that a backend that is not used adds no time to `import lsm_jax`.
    return importlib.import_module(f"pallas_kernels.rwkv7.{name}")


def mixes_by_kernel(interpret: Any, x, before, shares) -> tuple[jax.Array, ...]:
    """Return the results of `token_mixes`, with gradients by the fused kernel; `interpret` are parameters of its interpreter."""
    return _mixes(interpret, x, before, shares)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixes(interpret, x, before, shares):
    return xla.mixes(x, before, shares)


def _mixes_backward(interpret, saved, gradients):
    x, before, shares = saved
    rounded = shares.astype(x.dtype).astype(jnp.float32)
    d_x, d_before, d_shares = _kernel("mixes").backward(before - x, rounded, gradients, interpret)
    return d_x, d_before, d_shares.astype(shares.dtype)


_mixes.defvjp(lambda interpret, *a: (xla.mixes(*a), a), _mixes_backward)


def gates_by_kernel(interpret: Any, arguments: dict[str, jax.Array]) -> RWKV7Gates:
    """Return the results of `rwkv7_gates`, whose arguments are given by name, with gradients by the fused kernel."""
    return _gates(interpret, arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gates(interpret, arguments):
    return xla.gates(**arguments)


def _gates_forward(interpret, arguments):
    results = xla.gates(**arguments)
    return results, (arguments, results.log_decay)


def _gates_backward(interpret, saved, gradients):
    arguments, log_decay = saved
    found = _kernel("gates").backward(arguments, log_decay, gradients._asdict(), interpret)
    return ({n: found[n].astype(x.dtype) for n, x in arguments.items()},)


_gates.defvjp(_gates_forward, _gates_backward)


def output_by_kernel(interpret: Any, eps: float, arguments: dict[str, jax.Array]) -> jax.Array:
    """Return the result of `rwkv7_output`, whose arguments are given by name, with gradients by the fused kernel."""
    return _output(interpret, eps, arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _output(interpret, eps, arguments):
    return xla.output(**arguments, eps=eps)


def _output_backward(interpret, eps, arguments, dy):
    found = _kernel("output").backward(arguments, dy, eps, interpret)
    return ({n: found[n].astype(x.dtype) for n, x in arguments.items()},)


_output.defvjp(lambda interpret, eps, a: (xla.output(**a, eps=eps), a), _output_backward)


def run_mixes(call: Call) -> tuple[jax.Array, ...]:
    """Compute `token_mixes` with gradients by the fused kernel."""
    return mixes_by_kernel(False, **call.arguments)


def run_mixes_xla(call: Call) -> tuple[jax.Array, ...]:
    """Compute `token_mixes` by XLA."""
    return xla.mixes_in_two_passes(**call.arguments)


def run_gates(call: Call) -> RWKV7Gates:
    """Compute `rwkv7_gates` with gradients by the fused kernel."""
    return gates_by_kernel(False, call.arguments)


def run_gates_xla(call: Call) -> RWKV7Gates:
    """Compute `rwkv7_gates` by XLA."""
    # Otherwise a scan over layers would save every float32 array between arguments and results.
    return jax.checkpoint(xla.gates, prevent_cse=False)(**call.arguments)


def run_output(call: Call) -> jax.Array:
    """Compute `rwkv7_output` with gradients by the fused kernel."""
    return output_by_kernel(False, call.options.eps, call.arguments)


def run_output_xla(call: Call) -> jax.Array:
    """Compute `rwkv7_output` by XLA."""
    return xla.output(**call.arguments, eps=call.options.eps)


def _register(op: str, kernel: str, run: Callable[[Call], Any], run_xla: Callable[[Call], Any]):
    """Register the backends of `op`; its kernel is the module of `pallas_kernels.rwkv7` called `kernel`."""
    fused = Backend(
        name="mosaic_gpu",
        run=run,
        requirements=REQUIREMENTS,
        more=lambda call: _kernel(kernel).unsupported(call.arguments),
        platforms=("cuda",),
        compute_capabilities=("9.0",),
    )
    register(op, fused, Backend(name="xla", run=run_xla))


_register("token_mixes", "mixes", run_mixes, run_mixes_xla)
_register("rwkv7_gates", "gates", run_gates, run_gates_xla)
_register("rwkv7_output", "output", run_output, run_output_xla)
