"""The exponential of log decays in Triton. The module imports only Triton, as `bodies` does."""

from typing import Any

import triton
import triton.language as tl

_PTX: tl.constexpr = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has no PTX


@triton.jit
def decay_of(x) -> Any:
    """Return e^x in float32, 0 where it is below 2^-126: `tl.exp` has three more instructions for these."""
    if _PTX:
        decay = tl.inline_asm_elementwise(
            "{ .reg .f32 e; mul.f32 e, $1, 0f3FB8AA3B; ex2.approx.ftz.f32 $0, e; }",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        decay = tl.exp(x)
    return decay
