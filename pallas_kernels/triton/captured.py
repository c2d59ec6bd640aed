"""Calls of Triton kernels that XLA launches itself, as nodes of its graphs of CUDA (XLA's command buffers).

A graph contains jax-triton's custom call as a function that XLA captures, and captures again when a buffer has moved. Here the kernel's PTX
code, which jax-triton compiles too, is an attribute of XLA's custom call `__gpu$xla.gpu.ptx`. XLA launches it like its own kernels, and the
driver assembles it when a program first runs. The custom call is internal to XLA (openxla/xla: xla/service/gpu/kernel_call.cc for its
attributes, xla/codegen/emitters/kernel_arguments.cc for the order of its arguments), so that `available` accepts only the version of jax with
which a test compiles, and a jax-triton whose function that compiles has the known arguments.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any, NamedTuple

import jax
import jax.extend
from jax.interpreters import mlir, xla

_TARGET = "__gpu$xla.gpu.ptx"
_JAX = (0, 11, 2)  # the version of jax whose XLA is known to launch PTX code
_COMPILE = "self", "spec", "gpu_target", "backend", "backend_options"
_SHARED = 48 * 1024  # bytes of shared memory that every launch may have

_primitive = jax.extend.core.Primitive("captured_triton_call")
_primitive.multiple_results = True
_primitive.def_impl(functools.partial(xla.apply_primitive, _primitive))


class Code(NamedTuple):
    """A compiled kernel: its name and PTX code, the bytes of shared memory, and the number of its parameters for scratch memory."""

    name: str
    ptx: str
    shared: int
    scratch: int


def available(jax_triton: Any) -> bool:
    """Return whether the installed jax and jax-triton are known to have what these calls use."""
    function = getattr(jax_triton.triton_lib, "TritonFunction", None)
    compile_kernel = getattr(function, "_compile_kernel", None)
    if jax.__version_info__ != _JAX or compile_kernel is None:
        return False
    return tuple(inspect.signature(compile_kernel).parameters) == _COMPILE


def call(
    kernel: Any,
    arrays: list[Any],
    types: tuple[Any, ...],
    *,
    in_place: bool,
    numbers: dict[int, int | float],
    constants: dict[str, Any],
    programs: int,
    capability: int | None,
    options: dict[str, Any],
) -> list[jax.Array]:
    """Run a Triton kernel on an NVIDIA card; return its outputs, and with `in_place` also its first array, after the kernel.

    Lowering raises `NotImplementedError` for a kernel with scratch memory or more than 48 KiB of shared memory.

    Args:
        kernel: a function that `triton.jit` decorates.
        arrays: the inputs that are arrays, in order.
        types: shapes and dtypes of the outputs.
        in_place: whether the kernel changes its first array, in the same buffer if nothing else uses the array.
        numbers: the inputs that are numbers, by position. They become constants of the code.
        constants: the `tl.constexpr` parameters, by name.
        programs: number of programs.
        capability: the compute capability times 10, or None for the card for which the program is lowered.
        options: those of Triton's compiler, with num_warps, num_stages and num_ctas.
    """
    fixed = tuple(constants.items())
    results = _primitive.bind(
        *arrays, types=types, in_place=in_place, programs=programs, kernel=kernel, numbers=tuple(numbers.items()), constants=fixed,
        capability=capability, options=tuple(options.items()),
    )  # fmt: skip
    # In a caller's `jax.shard_map` results vary over the mesh axes over which an input varies.
    varying = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))
    if not varying:
        return results
    return [jax.lax.pcast(x, tuple(varying), to="varying") for x in results]


@_primitive.def_abstract_eval
def _result_types(*arrays, types, in_place, **parameters):
    del parameters
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in (*types, *arrays[: int(in_place)])]


def _lower(context, *operands, types, in_place, programs, capability, options, **parameters):
    """Lower a call to XLA's custom call."""
    from pallas_kernels.triton.launch import jax_triton

    target = jax_triton().triton_lib.make_cuda_target(capability, dict(options)["num_ctas"])
    inputs, results = context.avals_in, context.avals_out
    dtypes = tuple(jax.numpy.dtype(x.dtype) for x in (*inputs, *types))
    code = _compile(dtypes=dtypes, target=target, options=options, **parameters)
    # Behind the outputs are the parameters for scratch memory, which the kernel does not read: the array that the kernel changes has
    # one as a result, and the last input is passed once more for each of the others.
    others = code.scratch - int(in_place)
    if others < 0:
        raise NotImplementedError(f"{code.name} has no parameter for the array that it changes")
    last, places = len(operands) - 1, range(len(operands), len(operands) + len(results))
    rule = jax.ffi.ffi_lowering(_TARGET, operand_output_aliases={0: len(types)} if in_place else {})
    return rule(
        context.replace(avals_in=[*inputs, *inputs[last:] * others]),
        *operands,
        *operands[last:] * others,
        name=code.name,
        kernel_type="ptx",
        kernel_data=code.ptx,
        output_indices=tuple(places),
        grid_x=programs,
        grid_y=1,
        grid_z=1,
        block_x=32 * dict(options)["num_warps"],
        block_y=1,
        block_z=1,
        shared_mem_bytes=code.shared,
    )


mlir.register_lowering(_primitive, _lower, platform="cuda")


@functools.lru_cache(maxsize=256)
def _compile(kernel, dtypes, numbers, constants, target, options) -> Code:
    """Compile a kernel with arrays of `dtypes`, inputs and then outputs, to PTX code, as jax-triton does. Pointers are multiples of 16."""
    from triton.compiler import make_backend

    from pallas_kernels.triton.launch import jax_triton

    library: Any = jax_triton().triton_lib
    fixed, positions = dict(constants), dict(numbers)
    arguments = [n for n in kernel.arg_names if n not in fixed]
    fixed |= {arguments[n]: x for n, x in positions.items()}
    pointers = [n for n in arguments if n not in fixed]
    names = (library.get_type_id(jax.core.ShapedArray((), x)) for x in dtypes)
    kinds = dict(zip(pointers, names, strict=True))
    backend = make_backend(target)
    specialization = library.KernelSpecialization(
        signature={n: kinds.get(n, "constexpr") for n in kernel.arg_names},
        specialization=[],
        attrs={(kernel.arg_names.index(n),): backend.parse_attr("D") for n in pointers},
        constants=fixed,
    )
    result = library.TritonFunction(kernel)._compile_kernel(
        specialization, target, backend, dict(options)
    )[-1]
    parameters = re.findall(rf"\b{re.escape(result.name)}_param_\d+(?=[,\s]*\n)", result.binary)
    scratch = parameters[len(pointers) :]
    assert len(parameters) == len(pointers) + len(scratch), (parameters, pointers)
    read = [n for n in scratch if f"[{n}]" in result.binary]
    if read or result.global_scratch_size or result.shared_mem_bytes > _SHARED:
        raise NotImplementedError(
            f"{result.name} has {result.shared_mem_bytes} bytes of shared memory (at most {_SHARED}) and {result.global_scratch_size} of "
            f"scratch memory (None), and reads its parameters {read} for scratch memory (none)"
        )
    return Code(result.name, result.binary, result.shared_mem_bytes, len(scratch))
