"""Tensors of the host for Triton's interpreter, which runs a kernel on a CPU with numpy and without PyTorch.

The interpreter (TRITON_INTERPRET=1, set before Triton is imported) checks values and indices. It does not know tf32, shared memory
or races.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

_NAMES = {
    np.dtype(np.float32): "fp32",
    np.dtype(np.float16): "fp16",
    np.dtype(ml_dtypes.bfloat16): "bf16",
    np.dtype(np.int32): "i32",
    np.dtype(np.int64): "i64",
    np.dtype(np.bool_): "i1",
}


class HostTensor:
    """A numpy array with the methods that Triton's interpreter calls on a tensor. It is its own storage: nothing is copied, and the
    kernel writes into the array.
    """

    def __init__(self, array: np.ndarray):
        self.array = array
        self.dtype = _NAMES[array.dtype]

    def data_ptr(self) -> int:
        """Return the address of the array's first entry."""
        return self.array.ctypes.data

    def untyped_storage(self) -> HostTensor:
        """Return the tensor itself, which is its own storage."""
        return self

    def cpu(self) -> HostTensor:
        """Return the tensor itself, which is on the host."""
        return self

    def copy_(self, other: HostTensor) -> None:
        """Do nothing: the copy on the host is the same array."""
        assert other.array is self.array

    def new_empty(self, *_: Any, **__: Any) -> HostTensor:
        """Return a tensor without an array, which `set_` fills."""
        return HostTensor.__new__(HostTensor)

    def set_(self, storage: HostTensor, *_: Any) -> None:
        """Use the array of another tensor."""
        self.array, self.dtype = storage.array, storage.dtype

    def storage_offset(self) -> int:
        """Return 0: the array begins where its storage begins."""
        return 0

    def size(self) -> tuple[int, ...]:
        """Return the array's shape."""
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        """Return the array's strides, in entries."""
        return tuple(s // self.array.itemsize for s in self.array.strides)


def broadcast_conditions() -> None:
    """Change Triton's interpreter in this process so that a scalar condition can be the mask of a block, as on a GPU.

    The interpreter of Triton 3.9 gives a block that is made of one value the dtype of what the condition compares, an integer, which it
    does not accept as a mask. Here the block has the dtype of the value.
    """
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder

    def splat(self, block, x):
        data = np.full(block.shape, x.data, dtype=x.data.dtype)
        return interpreter.TensorHandle(data, x.dtype.scalar)

    builder.create_splat = splat


def compute_bfloat16_exactly() -> None:
    """Change Triton's interpreter in this process so that it computes bfloat16 as a GPU does.

    The interpreter of Triton 3.9 multiplies the bit patterns of bfloat16 in `tl.dot`, and truncates where it converts to bfloat16.
    Here products are computed in float32, and conversions round to the nearest.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    dot, cast, fp_to_fp = builder.create_dot, builder.cast_impl, builder.create_fp_to_fp

    def wide(self, x):
        return self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def rounded(plain):
        def convert(self, x, to, *rest):
            if to.scalar == tl.bfloat16 and x.dtype.scalar == tl.float32:
                data = x.data.astype(ml_dtypes.bfloat16).view(np.uint16)
                return handle(data, tl.bfloat16)
            return plain(self, x, to, *rest)

        return convert

    builder.create_dot = lambda self, a, b, *rest: dot(self, wide(self, a), wide(self, b), *rest)
    builder.cast_impl, builder.create_fp_to_fp = rounded(cast), rounded(fp_to_fp)
