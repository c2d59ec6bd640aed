"""The cases of the tests of Hopper's kernels (`make test-gpu`) as checks of the Triton kernels, of `python -m benchmarks triton_kernels`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.calls import attention, compare, memories, tokens
from pallas_kernels.decode_step import cases as decode_step_cases
from pallas_kernels.forgetting_attention import cases as attention_cases
from pallas_kernels.memory_cases import SEGMENTS, SEGMENTS_WIDE, SLOTS
from pallas_kernels.selective_scan import cases as selective_scan_cases
from pallas_kernels.short_convolution import cases as short_convolution_cases


class Shared(NamedTuple):
    """A case of Hopper's kernels: the op's name in the benchmark's rows, and the function that returns what a check returns."""

    op: str
    check: Callable[[], dict[str, Any]]


def _judged(make: Callable[..., compare.Compared], *arguments: Any) -> Callable[[], dict[str, Any]]:
    return lambda: compare.judged(make(*arguments), "triton")


def _memory_op(configuration: tuple) -> str:
    """Return the name, in the benchmark's rows, of the op of one of `memories.CONFIGURATIONS`."""
    words = str(configuration[-1])
    if "dplr" in words:
        return "rwkv7"
    if "delta" in words:
        kind = words.removeprefix("delta").removeprefix(", ")
        return "undecayed delta rule" if "undecayed" in kind else "kda" if "channel" in kind else "gated delta rule" if kind else "delta rule"  # fmt: skip
    kinds = {"bonus": "key decay and bonus", "value": "value decay", "channel": "key decay"}
    kinds |= {"constant": "constant decay", "None": "no decay"}
    return next((name for word, name in kinds.items() if word in words), "scalar decay")


_SEGMENT_OPS = {
    ("linear", None): "no decay", ("linear", "token"): "scalar decay", ("linear", "channel"): "key decay",
    ("linear", "bonus"): "key decay and bonus", ("linear", "value"): "value decay", ("delta", None): "delta rule",
    ("delta", "token"): "gated delta rule", ("delta", "channel"): "kda", ("dplr", "channel"): "rwkv7",
}  # fmt: skip


def pieces(name: str) -> dict[str, Any]:
    """Return the errors of the calls of a row in pieces, each from the state before, against XLA, and whether a second run has the same bits
    and the states are XLA's. A call does not have the tokens of the next piece, so that causality is not tested. The outputs of tokens beyond
    the state's capacity, and no others, must be NaN, as in the test of Hopper's kernel.
    """
    results, again = (attention.pieces(name, "triton") for _ in range(2))
    errors = {
        f"output {n}": compare.error_of_numbers(a[0], b[0])
        for n, (a, b) in enumerate(results)
        if a[0].size
    }
    states = [compare.same_bits(actual[1], expected[1]) for actual, expected in results]
    same = compare.same_bits([a for a, _ in results], [a for a, _ in again])
    return dict(errors=_rounded(errors), same_bits=same and all(states), not_causal=0)


def state_gradients() -> dict[str, Any]:
    """Return the errors of the gradients of the tokens and of the state that a call continues from; NaN must be where XLA's are."""
    found, again, wanted = (
        [(path, x) for path, x in jax.tree.leaves_with_path(attention.state_gradients(name)) if x.dtype != jax.dtypes.float0]
        for name in ("triton", "triton", "xla")
    )  # fmt: skip
    errors = {
        f"d_{jax.tree_util.keystr(path)}": compare.error_of_numbers(a, b)
        for (path, a), (_, b) in zip(found, wanted, strict=True)
    }
    same = compare.same_bits(*([x for _, x in leaves] for leaves in (found, again)))
    return dict(errors=_rounded(errors), same_bits=same, not_causal=0)


def one_token(case: decode_step_cases.Case) -> dict[str, Any]:
    """Return the errors of one token's output and memory; "not_causal" is the number of entries of the memories of other layers, and of rows
    that nothing is written to, that change.
    """
    op, heads, key_dim, value_dim, decays, documents, stacked, dtype, batch = case
    arrays = tokens.one_token_inputs(op, heads, key_dim, value_dim, decays, documents, dtype, batch)
    run = functools.partial(tokens.one_token, op, stacked=stacked)
    fused = jax.jit(lambda x: run(x, implementation="triton"))
    output, memory = fused(arrays)
    same = compare.same_bits((output, memory), fused(arrays))
    wide = {n: x.astype(jnp.float32) if x.dtype == dtype else x for n, x in arrays.items()}
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(lambda x: run(x, implementation="xla", form="recurrent"))(wide)
    errors = dict(output=compare.error(output, expected[0]), final=compare.error(memory, expected[1]))  # fmt: skip
    own = memory[1] if stacked else memory
    changed = jnp.sum(own[:2] != arrays["memory"][:2]) if documents else 0
    if stacked:
        changed += jnp.sum(memory[0] != -arrays["memory"]) + jnp.sum(memory[2] != 2 * arrays["memory"])  # fmt: skip
    return dict(errors=_rounded(errors), same_bits=same, not_causal=int(changed))


def _rounded(errors: dict[str, float]) -> dict[str, float]:
    return {n: float(f"{e:.3g}") for n, e in errors.items()}


def cases() -> Iterator[tuple[str, Shared]]:
    """Yield every case of Hopper's kernels of ops that have Triton kernels, by the name of its check."""
    for x in memories.CONFIGURATIONS:
        yield f"memory {compare.case_id(x)}", Shared(_memory_op(x), _judged(memories.memory, x))
    for name, x in (SEGMENTS | SEGMENTS_WIDE).items():
        yield f"segments {name}", Shared(_SEGMENT_OPS[x.op, x.decay], _judged(memories.segments, x))
    for x in SLOTS:
        yield f"slots {compare.case_id(x)}", Shared("slot memory", _judged(memories.slots, x))
    for x in attention_cases.HOPPER:
        yield f"attention {compare.case_id(x)}", Shared("forgetting attention", _judged(attention.attention, x))  # fmt: skip
    for x in attention_cases.HOPPER_PARTS:
        for where in (0, 1, 3):
            yield f"attention parts {where} {compare.case_id(x)}", Shared("forgetting attention", _judged(attention.parts, x, where))  # fmt: skip
    for name in attention_cases.SPLITS:
        yield f"attention pieces {name}", Shared("forgetting attention", functools.partial(pieces, name))  # fmt: skip
    yield "attention state gradients", Shared("forgetting attention", state_gradients)
    for x in selective_scan_cases.HOPPER:
        yield f"scan {x.id}", Shared("selective memory", _judged(tokens.scan, x))
    for x in short_convolution_cases.HOPPER:
        op = "convolution" if x.head_dim is None else "normalised convolution"
        yield f"convolution {x.id}", Shared(op, _judged(tokens.convolution, x))
    for x in decode_step_cases.HOPPER:
        op = "one token with decay" if x.op == "linear" else "one token by delta rule"
        yield f"one token {x.id.replace(',', '.')}", Shared(op, functools.partial(one_token, x))


REFUSED = {
    "memories of 384 and 768 value channels": lambda name: any(f"-{v}-" in name for v in (384, 768)),
    "segments of 384 value channels": lambda name: name in ("segments channels-wide", "segments delta-channels-wide"),
    "a number of each channel, complex or real": lambda name: name.startswith("scan") and "N=" not in name,
}  # fmt: skip
"""The cases that the Triton kernels do not support, by what they have."""
CHECKS = {n: x for n, x in cases() if not any(refused(n) for refused in REFUSED.values())}
"""Checked calls by name."""


def check(name: str) -> dict[str, Any]:
    """Return the errors of one of `CHECKS` against XLA in float32, with the Triton kernels compiled as `launch` says."""
    return CHECKS[name].check()
