"""The only module that imports `jax_triton`: it calls a Triton kernel from JAX, or runs it in Triton's interpreter.

It is imported only if a Triton kernel is called. jax-triton compiles a kernel when a program is lowered, and XLA's ptxas assembles
the result. Three settings are made here for every kernel: the compute capability, which must be known before lowering; the version
of the PTX code, since Triton would write the version of its own ptxas, which XLA's may not accept; and the fusion of products and
sums to one instruction, whose default changes in Triton 3.10.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.requirements import Requirement
from pallas_kernels.triton import captured as captured_call

CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
"""The compute capabilities of the NVIDIA cards for which the kernels are compiled by the tests."""
PTX_VERSION = 88  # of CUDA 12.9, the oldest that is known to accept all of `CAPABILITIES`
_forced: list[str] = []


def installed() -> bool:
    """Return whether the packages of the extra [triton], jax-triton and Triton, are installed; neither is imported."""
    return all(importlib.util.find_spec(name) is not None for name in ("jax_triton", "triton"))


INSTALLED = Requirement(
    "the packages jax-triton and triton (extra [triton], on Linux)", lambda call: usable()
)
"""The requirement of every Triton kernel that the extra [triton] is installed."""


def interpreted() -> bool:
    """Return whether this process runs Triton kernels in Triton's interpreter, on its CPU: TRITON_INTERPRET=1 was set when it
    started.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def usable() -> bool:
    """Return whether Triton kernels can run in this process: they are installed, or run in Triton's interpreter."""
    return installed() or interpreted()


@contextlib.contextmanager
def code_for(capability: str) -> Iterator[None]:
    """Compile the Triton kernels that are traced in this context for one compute capability, such as "8.0", whichever card is here.

    A card runs code for its own capability, and for the capabilities 8.x that are not above its own. JAX's caches are cleared at both
    ends, since they do not know the capability.
    """
    jax.clear_caches()
    _forced.append(capability)
    try:
        yield
    finally:
        _forced.pop()
        jax.clear_caches()


def capability() -> int | None:
    """Return the compute capability for which kernels are compiled, times 10: that of `code_for`, or of this process's first card.

    None if this process has no card: jax-triton then reads the device of the current abstract mesh when a program is lowered for
    NVIDIA, and a program that is lowered for another platform needs none.
    """
    if _forced:
        return round(10 * float(_forced[-1]))
    try:
        return round(10 * float(jax.local_devices(backend="cuda")[0].compute_capability))
    except RuntimeError:
        return None


def stages_of(stages: int, capability: int | None, shared_loads: bool) -> int:
    """Return the number of stages with which a kernel is compiled for a compute capability, times 10.

    Products of 9.0 and 10.0 read their operands from shared memory while the program goes on. For a load that is an operand and is read
    into registers too, Triton 3.9 keeps one buffer, and copies the next tile into it while the product may still read the last one.
    With `shared_loads`, which says that a kernel has such loads, code for these cards therefore has one stage, and so has code whose
    capability is not known yet (None: see `capability`).
    """
    return 1 if shared_loads and (capability is None or 90 <= capability < 120) else stages


def compiler_options(registers: int = 0) -> dict[str, Any]:
    """Return the options with which Triton compiles every kernel, with the largest number of registers of a thread unless it is 0."""
    options: dict[str, Any] = dict(ptx_version=PTX_VERSION, enable_fp_fusion=True)
    return options | (dict(maxnreg=registers) if registers else {})


def jax_triton() -> Any:
    """Import and return `jax_triton`.

    It imports two names for copies by Hopper's TMA, which no kernel here uses, and which Triton 3.6 lacks.
    """
    from triton.backends.nvidia import driver

    for name, value in dict(TMA_DTYPE_DEVICE_TO_HOST={}, TMA_TF32=0).items():
        if not hasattr(driver, name):
            setattr(driver, name, value)
    import jax_triton

    return jax_triton


def call(
    kernel: Any,
    inputs: tuple[Any, ...],
    outputs: dict[str, jax.ShapeDtypeStruct],
    *,
    programs: int,
    warps: int,
    stages: int,
    registers: int = 0,
    in_place: Any = "",
    shared_loads: Any = False,
    captured: Any = False,
    **constants: Any,
) -> dict[str, jax.Array]:
    """Run a Triton kernel and return its outputs by name.

    `jax.vmap` of a call runs the kernel once for each index of the mapped axis; it is not supported with `in_place`.

    Args:
        kernel: a function that `triton.jit` decorates. Its first parameters are the inputs, and then the outputs.
        inputs: arrays, and numbers that do not change between calls of one program. None is a pointer that the kernel does not
            read: the first input, or the second with `in_place`, takes its place.
        outputs: shapes and dtypes, by parameter name.
        programs: number of programs, along the grid's first axis.
        warps: number of warps of a program.
        stages: number of iterations of a loop whose loads are in flight.
        registers: largest number of registers of a thread, so that more programs run at a time; 0 is the compiler's choice.
        in_place: if not empty, the kernel changes its first input, an array, which is returned by this name: in the same buffer, if
            nothing else uses the input.
        shared_loads: whether the kernel's loop in stages reads an operand of a product in registers too: see `stages_of`.
        captured: whether XLA launches the kernel itself where it can, as a node of its graphs of CUDA (see `captured.py`); numbers are
            then constants of the code. The kernel has no scratch memory and at most 48 KiB of shared memory.
        constants: the kernel's `tl.constexpr` parameters, by name.
    """
    # Not the array that is changed in place: XLA would copy it for its second use.
    unused = inputs[1 if in_place else 0]
    inputs = tuple(unused if x is None else x for x in inputs)
    arrays = [x for x in inputs if isinstance(x, jax.Array)]
    numbers = {n: x for n, x in enumerate(inputs) if not isinstance(x, jax.Array)}
    types = tuple(outputs.values())
    changed = [jax.ShapeDtypeStruct(inputs[0].shape, inputs[0].dtype)] if in_place else []

    def arguments(arrays):
        given = iter(arrays)
        return [numbers[n] if n in numbers else next(given) for n in range(len(inputs))]

    if interpreted():

        def on_host(*arrays):
            inputs = [*arguments(arrays)]
            first = inputs[0] = np.array(inputs[0]) if in_place else inputs[0]
            results = _interpret(kernel, inputs, types, programs, constants)
            return (*results, first) if in_place else results

        results = jax.pure_callback(on_host, (*types, *changed), *arrays, vmap_method="sequential")
    else:
        package, number = jax_triton(), capability()
        options = compiler_options(registers) | dict(
            num_warps=warps, num_stages=stages_of(stages, number, shared_loads), num_ctas=1
        )
        by_xla = captured and captured_call.available(package)

        def on_card(*arrays):
            if by_xla:
                return captured_call.call(
                    kernel, [*arrays], types, in_place=bool(in_place), numbers=numbers, constants=constants, programs=programs,
                    capability=number, options=options,
                )  # fmt: skip
            return package.triton_call(
                *arguments(arrays),
                kernel=kernel,
                out_type=types,
                grid=(programs,),
                name=f"lsm_{kernel.fn.__name__}",
                compute_capability=number,
                backend_options=options,
                **constants,
            )

        if in_place:
            update = on_card if by_xla else functools.partial(_update_first, on_card, types)
            results = update(*arrays)
        else:
            results = jax.custom_batching.sequential_vmap(on_card)(*arrays)
    names = [*outputs, in_place] if in_place else outputs
    return dict(zip(names, results, strict=True))


def _update_first(on_card: Any, types: tuple[Any, ...], *arrays: Any) -> tuple[Any, ...]:
    """Run a kernel that changes its first array; return its outputs, which have the shapes and dtypes `types`, and the array after it."""
    from pallas_kernels.compat import pl

    def run(refs):
        first, *results = refs
        for ref, value in zip(results, on_card(first, *arrays[1:]), strict=True):
            ref[...] = value

    blank = [jnp.zeros(x.shape, x.dtype) for x in types]
    first, *results = pl.run_state(run)([arrays[0], *blank])
    return (*results, first)


def _interpret(kernel, inputs, types, programs: int, constants) -> tuple[np.ndarray, ...]:
    """Run a kernel in Triton's interpreter on arrays of the host. Outputs that it does not store stay NaN."""
    from pallas_kernels.triton.host import HostTensor, broadcast_conditions

    broadcast_conditions()
    results = []
    for x in types:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        results.append(np.full(x.shape, math.nan if floating else 0, x.dtype))
    arrays = [np.ascontiguousarray(x) if hasattr(x, "dtype") else x for x in inputs]
    pointers = [HostTensor(x) if isinstance(x, np.ndarray) else x for x in (*arrays, *results)]
    kernel[programs,](*pointers, **constants)
    return tuple(results)
