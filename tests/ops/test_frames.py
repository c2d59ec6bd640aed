"""Tests of the depth of the call stack between an op and its kernel: at most seven functions of this project,
and no file is left and entered again.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from lsm_jax import ops
from tests.marks import slow_after

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("lsm_jax", "pallas_kernels")
HIGHEST = 7

Q = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16)
GATE = jax.ShapeDtypeStruct((2, 256, 2), jnp.float32)
CALLS = {
    "linear_memory": (lambda q, g, **o: ops.linear_memory(q, q, q, g, **o), "linear_attention"),
    "linear_memory by channel": (
        lambda q, g, **o: ops.linear_memory(q, q, q, jnp.broadcast_to(g[..., None], q.shape), **o),
        "linear_attention",
    ),
    "delta_memory": (lambda q, g, **o: ops.delta_memory(q, q, q, g, g, **o), "delta_rule"),
    "attention": (lambda q, g, **o: ops.attention(q, q, q, log_forget=g, **o), "forgetting_attention"),
}  # fmt: skip


def frames_to_kernel(run, package: str) -> list[tuple[str, str]]:
    """Return (file, function) of this project's frames on the call stack, outermost first, when the forward
    function of the kernel package `package` is called by `run`.
    """
    deepest: list[list[tuple[str, str]]] = []

    def profile(frame, event, _):
        code = frame.f_code
        inside = f"pallas_kernels/{package}/" in code.co_filename
        if event != "call" or deepest or code.co_name != "forward" or not inside:
            return
        stack = []
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ROOMS:
                stack.append((str(path.relative_to(ROOT)), frame.f_code.co_name))
            frame = frame.f_back
        deepest.append(stack[::-1])

    jax.clear_caches()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    assert deepest, f"no function `forward` of pallas_kernels/{package} was called"
    return deepest[0]


@pytest.mark.parametrize("implementation", slow_after(1, ["mosaic_gpu", None]))
@pytest.mark.parametrize("call", CALLS)
def test_at_most_seven_frames_and_each_file_once(call, implementation):
    op, package = CALLS[call]

    def run():
        jax.eval_shape(lambda q, g: op(q, g, implementation=implementation)[0], Q, GATE)

    frames = frames_to_kernel(run, package)
    told = "\n".join(f"{file}: {name}" for file, name in frames)
    assert len(frames) <= HIGHEST, told
    files = [file for file, _ in itertools.groupby(frames, key=lambda frame: frame[0])]
    assert len(files) == len(set(files)), told
