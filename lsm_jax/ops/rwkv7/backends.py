"""The backends of `token_mixes`, `rwkv7_gates` and `rwkv7_output`: fused kernels for Hopper, and XLA.

XLA's backward passes read and write several times as much as kernels do, because sums over channels and over tokens divide them. Of its
forward passes those with sums over the 64 channels of a head run at a third to a half of the bandwidth; that of `token_mixes`, which
has none, is left to XLA.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lsm_jax.ops.backends.registry import PALLAS, Backend, Call, register
from lsm_jax.ops.core.saved import convolved
from lsm_jax.ops.rwkv7 import xla
from lsm_jax.ops.rwkv7.xla import RWKV7Gates
from pallas_kernels.requirements import Requirement
from pallas_kernels.residuals import behind_barrier, name_residuals

_MIN_TOKENS = 64

REQUIREMENTS = (
    Requirement(
        f"{_MIN_TOKENS} tokens or more",
        lambda call: call.length >= _MIN_TOKENS,
        lambda call: str(call.length),
    ),
    *PALLAS,
)


class MixOptions(NamedTuple):
    """The options of `token_mixes` that are constant when a program is compiled.

    Attributes:
        twice: the indices of the results of which there is one more.
    """

    twice: tuple[int, ...]


class OutputOptions(NamedTuple):
    """The options of `rwkv7_output` that are constant when a program is compiled.

    Attributes:
        eps: added to the variance of a head.
    """

    eps: float


def _kernel(name: str) -> Any:
    # Imported here, so that a backend that is not used adds no time to `import lsm_jax`.
    return importlib.import_module(f"pallas_kernels.rwkv7.{name}")


def mixes_by_kernel(
    interpret: Any,
    x: jax.Array,
    shares: jax.Array,
    before: jax.Array | None = None,
    twice: tuple[int, ...] = (),
) -> tuple[jax.Array, ...]:
    """Return the results of `token_mixes`, with gradients by the fused kernel; `interpret` are parameters of its interpreter."""
    return _mixes(interpret, twice, x, before, shares)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mixes(interpret, twice, x, before, shares):
    return xla.mixes(x, before, shares, twice)


def _mixes_backward(interpret, twice, saved, gradients):
    x, before, shares = saved
    rounded, kernels = shares.astype(x.dtype).astype(jnp.float32), _kernel("mixes")
    if before is None:
        d_x, d_shares = kernels.backward_in_rows(x, rounded, gradients, twice, interpret)
        return d_x, None, d_shares.astype(shares.dtype)
    d_x, d_before, d_shares = kernels.backward(before - x, rounded, gradients, twice, interpret)
    return d_x, d_before, d_shares.astype(shares.dtype)


def _mixes_forward(interpret, twice, x, before, shares):
    mixes = xla.mixes(x, before, shares, twice)
    if before is None:
        # When mixes are computed again, the kernel waits for them: otherwise XLA computes them, and the gradients of the matrices that
        # multiply them, after all layers, and keeps the gradients of all layers' mixes until then.
        x, *mixes = jax.lax.optimization_barrier((x, *mixes))
    return tuple(mixes), (x, before, shares)


_mixes.defvjp(_mixes_forward, _mixes_backward)


def gates_by_kernel(interpret: Any, arguments: dict[str, jax.Array]) -> RWKV7Gates:
    """Return the results of `rwkv7_gates`, whose arguments are given by name, and their gradients by the fused kernels."""
    return _gates(interpret, arguments)


def compute_gates(interpret: Any, arguments: dict[str, jax.Array]) -> RWKV7Gates:
    """Return the results of `rwkv7_gates` by its kernel, of which `remat="dots_and_convolutions"` saves all that are new."""
    found = behind_barrier(_kernel("gates").forward(arguments, interpret))
    return RWKV7Gates(r=arguments["r"], **jax.tree.map(convolved, found))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gates(interpret, arguments):
    return compute_gates(interpret, arguments)


def _gates_forward(interpret, arguments):
    results = compute_gates(interpret, arguments)
    return results, (arguments, results.log_decay)


def _gates_backward(interpret, saved, gradients):
    arguments, log_decay = saved
    found = _kernel("gates").backward(arguments, log_decay, gradients._asdict(), interpret)
    return ({n: found[n].astype(x.dtype) for n, x in arguments.items()},)


_gates.defvjp(_gates_forward, _gates_backward)


def output_by_kernel(interpret: Any, eps: float, arguments: dict[str, jax.Array]) -> jax.Array:
    """Return the result of `rwkv7_output`, whose arguments are given by name, and its gradients by the fused kernels."""
    return _output(interpret, eps, arguments)


def compute_output(interpret: Any, eps: float, arguments: dict[str, jax.Array]) -> jax.Array:
    """Return the result of `rwkv7_output` by its kernel, saved as other kernels' results: the gradient of the product behind it reads it."""
    return name_residuals(_kernel("output").forward(arguments, eps, interpret))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _output(interpret, eps, arguments):
    return compute_output(interpret, eps, arguments)


def _output_forward(interpret, eps, arguments):
    return compute_output(interpret, eps, arguments), arguments


def _output_backward(interpret, eps, arguments, dy):
    found = _kernel("output").backward(arguments, dy, eps, interpret)
    return ({n: found[n].astype(x.dtype) for n, x in arguments.items()},)


_output.defvjp(_output_forward, _output_backward)


def run_mixes(call: Call) -> tuple[jax.Array, ...]:
    """Compute `token_mixes` with gradients by the fused kernel."""
    return mixes_by_kernel(False, **call.arguments, twice=call.options.twice)


def run_mixes_xla(call: Call) -> tuple[jax.Array, ...]:
    """Compute `token_mixes` by XLA."""
    x, before = call.arguments["x"], call.arguments.get("before")
    before = xla.token_before(x) if before is None else before
    return xla.mixes_in_two_passes(call.options.twice, x, before, call.arguments["shares"])


def run_gates(call: Call) -> RWKV7Gates:
    """Compute `rwkv7_gates` by the fused kernels."""
    return gates_by_kernel(False, call.arguments)


def run_gates_xla(call: Call) -> RWKV7Gates:
    """Compute `rwkv7_gates` by XLA."""
    # Otherwise a scan over layers would save every float32 array between arguments and results.
    return jax.checkpoint(xla.gates, prevent_cse=False)(**call.arguments)


def run_output(call: Call) -> jax.Array:
    """Compute `rwkv7_output` by the fused kernels."""
    return output_by_kernel(False, call.options.eps, call.arguments)


def run_output_xla(call: Call) -> jax.Array:
    """Compute `rwkv7_output` by XLA."""
    return xla.output(**call.arguments, eps=call.options.eps)


def _given(call: Call) -> dict[str, Any]:
    """Return what a kernel's requirements are about: the arrays of a call and, of `token_mixes`, the number of results."""
    if not isinstance(call.options, MixOptions):
        return call.arguments
    return call.arguments | dict(
        results=call.arguments["shares"].shape[0] + len(call.options.twice)
    )


def _register(op: str, kernel: str, run: Callable[[Call], Any], run_xla: Callable[[Call], Any]):
    """Register the backends of `op`; its kernel is the module of `pallas_kernels.rwkv7` called `kernel`."""
    fused = Backend(
        name="mosaic_gpu",
        run=run,
        requirements=REQUIREMENTS,
        more=lambda call: _kernel(kernel).unsupported(_given(call)),
        platforms=("cuda",),
        compute_capabilities=("9.0",),
    )
    register(op, fused, Backend(name="xla", run=run_xla))


_register("token_mixes", "mixes", run_mixes, run_mixes_xla)
_register("rwkv7_gates", "gates", run_gates, run_gates_xla)
_register("rwkv7_output", "output", run_output, run_output_xla)
