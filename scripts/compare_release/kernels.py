"""The jaxprs of all fused kernels, forward and backward, as text that does not change when code is moved or renamed."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Call = tuple[str, Callable, tuple]  # name, function, arguments

# The parts of a jaxpr's text that depend on names of Python functions and files.
_NAMES = (
    (re.compile(r"0x[0-9a-f]+"), "0x"),
    (
        re.compile(
            r"\b(name|fun_jaxpr|call_jaxpr|debug_info|jaxpr|fun|name_and_src_info|tag)=[^\s\]]+"
        ),
        "",
    ),
    (re.compile(r"<function [^>]*>"), "<function>"),
    (re.compile(r"(let |in )?\b_?[A-Za-z_][\w.<>]*( = \{ lambda)"), r"\2"),
    (re.compile(r"\S+\.py:\d+(:\d+)?"), ""),
)


def kernels_of(function: Callable, *arguments: Any) -> list[str]:
    """Return the fused kernels in a function's jaxpr as text, in the order of their calls, without names of Python functions."""
    import jax

    kernels: list[str] = []
    seen: set[int] = set()

    def text(equation) -> str:
        parts = [equation.primitive.name]
        for name, value in sorted(equation.params.items()):
            if name not in ("debug_info", "name", "name_and_src_info", "metadata"):
                parts.append(f"{name}: {value}")
        joined = "\n".join(parts)
        for pattern, replacement in _NAMES:
            joined = pattern.sub(replacement, joined)
        return joined

    def visit(jaxpr) -> None:
        if id(jaxpr) in seen:
            return
        seen.add(id(jaxpr))
        for equation in jaxpr.eqns:
            if equation.primitive.name in ("pallas_call", "core_map", "mpmd_map", "run_state"):
                kernels.append(text(equation))
                continue
            for value in equation.params.values():
                for item in value if isinstance(value, (tuple, list)) else [value]:
                    inner = getattr(item, "jaxpr", item)
                    if hasattr(inner, "eqns"):
                        visit(inner)

    visit(jax.make_jaxpr(function)(*arguments).jaxpr)
    return kernels


def kernel_calls() -> Iterator[Call]:
    """Yield calls of ops, as (name, function, its arguments), that together contain every fused kernel,
    forward and backward.
    """
    yield from _memory_calls()
    yield from _scan_calls()
    yield _convolution_call()
    yield from _one_token_calls()


def _array(*shape: int, dtype: Any = None) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.ShapeDtypeStruct(shape, dtype or jnp.float32)


def _memory_inputs(case: tuple, length: int) -> tuple[dict, dict, dict]:
    """Return, for a kernel's test case (an entry of the table in tests/kernels/test_aot.py) and two rows of
    `length` tokens, three dicts of arguments of the op: input arrays, segment ids and update mask, and
    options.
    """
    import jax.numpy as jnp

    op, (heads, key_heads, memories), key_dim, value_dim, given = case
    given = given.split()
    tokens = functools.partial(_array, 2, length)
    shapes = (heads, key_dim), (key_heads, key_dim), (memories, value_dim)
    inputs = {n: tokens(*s, dtype=jnp.bfloat16) for n, s in zip("qkv", shapes, strict=True)}
    if op == "delta_memory":
        inputs["beta"] = tokens(memories)
    if op == "dplr_memory":
        inputs |= dict(a=inputs["k"], b=inputs["k"])
    if "log_decay" in given:
        inputs["log_decay"] = tokens(memories, *([key_dim] * ("channel" in given)))
    if "value_log_decay" in given:
        inputs["value_log_decay"] = tokens(memories, value_dim)
    if "bonus" in given:
        inputs["bonus"] = _array(memories, key_dim)
    if "slots" in given:
        inputs |= dict(s=tokens(memories, 64), log_decay=tokens(memories, 64))
    if "log_forget" in given:
        inputs["log_forget"] = tokens(heads)
    marks = {n: tokens(dtype=jnp.int32) for n in ("segment_ids", "update_mask") if n in given}
    options: dict[str, Any] = dict(window=200) if "window" in given else {}
    options |= dict(erase="undecayed") if "undecayed" in given else {}
    return inputs, marks, options


def _memory_calls() -> Iterator[Call]:
    """Yield calls of the memory ops and of attention, with their gradients, for the cases of
    tests/kernels/test_aot.py.
    """
    import jax

    from lsm_jax import ops
    from tests.kernels import test_aot as aot

    rows = [(c[:5], "mosaic_gpu") for c in aot.ON_HOPPER]
    rows += [(c, "mosaic_tpu") for c in aot.ON_TPU]
    for case, implementation in rows:
        for length in (1024, 8192) if case[1][2] <= 4 else (1024,):
            inputs, marks, options = _memory_inputs(case, length)

            def both(inputs, marks, op=case[0], options=options, name=implementation):
                def call(x):
                    return getattr(ops, op)(**x, **marks, **options, implementation=name)[0]

                output, pull = jax.vjp(call, inputs)
                return output, pull(output)

            yield f"{implementation} {case} T={length}", both, (inputs, marks)


def _scan_calls() -> Iterator[Call]:
    """Yield (name, function, arguments) for each call of the fused selective scan with its gradients.

    The arguments are arrays, not shapes, since the masks of these cases are computed during tracing.
    """
    import jax

    from tests.kernels import test_selective_scan_gpu as scans

    for implementation in ("mosaic_gpu", "mosaic_tpu"):
        for states in (16, 8, 0):
            arrays, marks = scans.make(scans.Case(300, 256, states, True))
            like = jax.eval_shape(
                functools.partial(scans.call, implementation="xla"), arrays, marks
            )

            def scan(arrays, marks, like, name=implementation):
                return scans.both(arrays, marks, name, like)

            yield f"{implementation} selective scan of {states}", scan, (arrays, marks, like)


def _convolution_call() -> Call:
    """Return (name, function, arguments) of a fused short convolution with its gradient."""
    import jax
    import jax.numpy as jnp

    from lsm_jax import ops

    x = _array(2, 300, 512, dtype=jnp.bfloat16)
    weight = _array(4, 512, dtype=jnp.bfloat16)

    def convolve(x, weight):
        def call(x, weight):
            return ops.short_convolution(
                x, weight, silu=True, head_dim=64, implementation="mosaic_gpu"
            )[0]

        output, pull = jax.vjp(call, x, weight)
        return output, pull(output)

    return "mosaic_gpu short convolution", convolve, (x, weight)


def _one_token_calls() -> Iterator[Call]:
    """Yield (name, function, arguments) for each memory op on one token, as in decoding, by the fused kernel
    of an NVIDIA GPU.
    """
    from lsm_jax import ops

    one = functools.partial(_array, 2, 1)
    for name, more in (
        ("linear_memory", dict(log_decay=one(4, 64))),
        ("delta_memory", dict(beta=one(4), log_decay=one(4))),
        ("dplr_memory", dict(a=one(4, 64), b=one(4, 64), log_decay=one(4, 64))),
    ):
        given = dict(q=one(4, 64), k=one(4, 64), v=one(4, 64)) | more

        def step(given, op=name):
            return getattr(ops, op)(**given, implementation="mosaic_gpu")

        yield f"mosaic_gpu one token of {name}", step, (given,)


def collect_kernels() -> Iterator[tuple[str, str]]:
    """Yield (name, SHA-256 of the jaxpr) for every fused kernel, and for every call the number of its
    kernels.

    If the environment variable COMPARE_TEXTS is set, the jaxprs are written into this folder, to be compared by eye.
    """
    import jax

    folder = os.environ.get("COMPARE_TEXTS")
    for name, function, arguments in kernel_calls():
        texts = kernels_of(function, *arguments)
        if not texts:
            raise RuntimeError(f"{name}: no kernel found in its jaxpr")
        for number, text in enumerate(texts):
            key = f"{name} #{number}"
            if folder:
                Path(folder, re.sub(r"[^\w.=]+", "_", key) + ".txt").write_text(text)
            yield key, hashlib.sha256(text.encode()).hexdigest()[:24]
        yield f"{name} count", str(len(texts))
        jax.clear_caches()
