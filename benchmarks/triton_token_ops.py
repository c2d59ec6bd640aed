"""Checks and times of the Triton kernels of `selective_memory`, `short_convolution` and one-token steps, for the benchmark
`triton_kernels`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.calls.compare import Compared, error, judged, same_bits
from benchmarks.cases import decode_step
from benchmarks.profile import by_kernel
from benchmarks.timing import batch_milliseconds
from lsm_jax import ops
from lsm_jax.ops.core.states import Layer
from pallas_kernels.short_convolution.cases import TIMED_HEAD_DIM


class Tokens(NamedTuple):
    """One checked call of `selective_memory`, `short_convolution` or one token.

    Attributes:
        op: the op's name in the benchmark's rows.
        batch: number of rows, B.
        length: number of tokens of a row, T, or of memories of one token.
        channels: number of channels, D, or of a head of one token.
        more: entries of a channel's memory, channels of a normalised head or None, or heads of q of one token.
        dtype: dtype of the tokens.
        documents: whether there are documents (and a mask, or emptied memories).
    """

    op: str
    batch: int
    length: int
    channels: int
    more: int | None
    dtype: str
    documents: bool


CHECKS = {
    "selective": Tokens("selective memory", 2, 1000, 256, 16, "bfloat16", True),
    "selective full": Tokens("selective memory", 8, 300, 2048, 16, "bfloat16", False),
    "selective long": Tokens("selective memory", 1, 8150, 128, 16, "bfloat16", True),
    "selective 8": Tokens("selective memory", 2, 700, 128, 8, "float16", True),
    "selective 32": Tokens("selective memory", 2, 500, 64, 32, "float32", True),
    "selective float32": Tokens("selective memory", 2, 1000, 256, 16, "float32", True),
    "convolution": Tokens("convolution", 2, 1000, 1024, None, "bfloat16", True),
    "convolution row": Tokens("convolution", 2, 1000, 768, None, "float32", False),
    "convolution 64": Tokens("convolution", 2, 700, 512, 64, "float16", True),
    "convolution short": Tokens("convolution", 3, 20, 512, 64, "bfloat16", True),
    "convolution 256": Tokens("convolution", 2, 700, 512, 256, "bfloat16", False),
    "one token with decay": Tokens("one token with decay", 64, 4, 128, 8, "bfloat16", True),
    "one token by delta rule": Tokens("one token by delta rule", 64, 4, 128, 4, "bfloat16", True),
    "one token 256": Tokens("one token by delta rule", 16, 4, 256, 4, "float16", False),
}
OPS = ("selective memory", "convolution", "normalised convolution", "one token with decay", "one token by delta rule")  # fmt: skip
_UNROLLED = 50  # steps of one token without a loop; XLA compiles 100 for minutes
_TOKEN = {
    "one token with decay": (ops.linear_memory, "key"),
    "one token by delta rule": (ops.delta_memory, "token beta"),
}
_STATES = 16  # of the selective memory that is timed


def _arrays(op: str, sizes: tuple[int, int, int], more: Any, dtype: str) -> dict[str, jax.Array]:
    """Return the random arrays of a call of `selective_memory` or `short_convolution`, by name; the state is "state"."""
    rng, (batch, length, channels) = np.random.default_rng(0), sizes

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    if op == "selective memory":
        return dict(
            u=normal(batch, length, channels).astype(dtype),
            delta=jax.nn.softplus(normal(batch, length, channels) - 4),
            A=-jnp.tile(jnp.arange(1.0, more + 1), (channels, 1)),
            B=normal(batch, length, more),
            C=normal(batch, length, more),
            D=normal(channels),
            state=normal(batch, channels, more),
        )
    return dict(
        x=normal(batch, length, channels).astype(dtype),
        weight=normal(4, channels),
        bias=normal(channels),
        state=normal(batch, 3, channels).astype(dtype),
    )


def _call(
    op: str, head_dim: int | None, ids: Any, mask: Any, exact: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Return `selective_memory` or `short_convolution` as a function of an implementation and of `_arrays`, whose results are the output and
    the final state; `exact` selects the step-by-step form of "xla".
    """

    def call(implementation, x):
        x = dict(x)
        state = x.pop("state")
        document = jnp.zeros(len(state), jnp.int32) if ids is None else jnp.ones(len(state), jnp.int32)  # fmt: skip
        options: dict[str, Any] = dict(segment_ids=ids, implementation=implementation)
        if op == "selective memory":
            options["form"] = "recurrent" if implementation == "xla" and exact else "chunk"
            state = ops.SelectiveState(state, document)
            output, state = ops.selective_memory(**x, **options, update_mask=mask, initial_state=state)  # fmt: skip
            return output, state.memory
        state = ops.ShiftState(state, document)
        output, state = ops.short_convolution(**x, **options, silu=True, head_dim=head_dim, initial_state=state)  # fmt: skip
        return output, state.tail

    return call


def check(name: str) -> dict[str, Any]:
    """Return the errors of one of `CHECKS` against XLA in float32, with the Triton kernels compiled as `launch` says."""
    case = CHECKS[name]
    return _check_token(case) if case.op in _TOKEN else judged(call_of(case), "triton")


def call_of(case: Tokens) -> Compared:
    """Return the call of one of `CHECKS` with more than one token."""
    op, batch, length, channels, more, dtype, documents = case
    rng = np.random.default_rng(1)
    ids = mask = None
    if documents:
        ids = np.cumsum(rng.random((batch, length)) < 0.01, axis=1) + 1
        ids = jnp.asarray(np.where(rng.random((batch, length)) < 0.02, 0, ids), jnp.int32)
        mask = jnp.asarray(rng.random((batch, length)) < 0.9)
    call = _call(op, None if op == "selective memory" else more, ids, mask, exact=True)
    x = _arrays(op, (batch, length, channels), more, dtype)
    types = jax.eval_shape(lambda y: call("xla", y), x)
    cotangents = jax.tree.map(lambda t: jnp.asarray(rng.normal(size=t.shape), t.dtype), types)
    return Compared(call, x, cotangents, tf32=dtype == "float32")


def _check_token(case: Tokens) -> dict[str, Any]:
    """Return the errors of one token's outputs and memories, which are one layer of a stack; "not_causal" is the number of entries of other
    layers' memories that change.
    """
    op, batch, memories, dim, query_heads, dtype, documents = case
    function, names = _TOKEN[op]
    arrays = decode_step.make_inputs(names, batch, memories, dim)
    queries = np.random.default_rng(2).normal(size=(batch, 1, query_heads, dim))
    arrays |= dict(q=jnp.asarray(queries, dtype), k=arrays["k"].astype(dtype), v=arrays["v"].astype(dtype))  # fmt: skip
    stack = jnp.asarray(np.random.default_rng(3).normal(size=(3, batch, memories, dim, dim)), jnp.float32)  # fmt: skip
    ids = jnp.resize(jnp.asarray([0, 1, 2, 1]), (batch, 1)) if documents else None

    def run(arrays, stack, **options):
        last = jnp.full(batch, int(documents), jnp.int32)
        state: Any = ops.DeltaState(Layer(stack, jnp.int32(1)), last)
        if function is ops.linear_memory:
            state = ops.LinearState(Layer(stack, jnp.int32(1)), None, None, last)
        output, state = function(**arrays, segment_ids=ids, initial_state=state, **options)
        memory: Any = state.memory
        return output, memory.stack

    fused = jax.jit(lambda a, s: run(a, s, implementation="triton"))
    output, memory = fused(arrays, stack)
    same = same_bits((output, memory), fused(arrays, stack))
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), arrays)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(lambda a, s: run(a, s, implementation="xla", form="recurrent"))(wide, stack)  # fmt: skip
    errors = dict(output=error(output, expected[0]), final=error(memory, expected[1]))
    not_causal = int(jnp.sum(memory[::2] != stack[::2]))
    return dict(errors=errors, same_bits=same, not_causal=not_causal)


def _device_milliseconds(program: Any, *arguments: Any) -> float:
    """Return the sum of the times in ms of the kernels of a compiled program, of a profile of ten calls."""
    call = functools.partial(program, *arguments)
    jax.block_until_ready(call())
    return sum(row["milliseconds"] for row in by_kernel(call, program.as_text(), calls=10))


def timer(
    op: str, shape: str, implementation: str | None, on_device: bool = False
) -> Callable[[], list[float]]:
    """Compile an op in bfloat16 at a shape BxTxHxD, with H D channels, and return a function that returns its times: [ms forward, ms forward
    and backward], or of one token, with B rows and H heads of D, [ms of a step]. With `on_device` they are sums over the kernels of a
    profile, which the host does not delay.
    """
    batch, length, heads, dim = map(int, shape.split("x"))
    if op in _TOKEN:
        function, names = _TOKEN[op]
        options = dict(implementation="xla", form="recurrent") if implementation == "xla" else {}
        options = options or dict(implementation=implementation)
        inputs = functools.partial(decode_step.make_inputs, names, batch, heads, dim)
        size = (batch, heads, dim, dim)
        memory = jax.ShapeDtypeStruct(size, jnp.float32)
        if on_device:
            raise NotImplementedError(f"{op}: times of kernels are those of ops with tokens")

        # As the peer's steps: from one memory, captured, and dispatched while the device computes those before.
        program = decode_step.steps(function, False, options, unrolled=_UNROLLED)
        program = program.lower(memory, jax.eval_shape(inputs)).compile()

        def one_token() -> list[float]:
            arrays, call = inputs(), functools.partial(decode_step.microseconds, program)
            return [call(jnp.zeros(size), arrays, _UNROLLED, calls=20) / 1000]

        return one_token
    more = _STATES if op == "selective memory" else TIMED_HEAD_DIM
    inputs = functools.partial(_arrays, op, (batch, length, heads * dim), more, "bfloat16")
    call = _call(op, TIMED_HEAD_DIM if "normalised" in op else None, None, None)

    def forward(x, dy):
        return call(implementation, x)[0]

    def both(x, dy):
        output, pull = jax.vjp(lambda y: call(implementation, y)[0], x)
        return output, pull(dy)

    source = "u" if op == "selective memory" else "x"
    arrays = jax.eval_shape(inputs)
    pair = [jax.jit(f).lower(arrays, arrays[source]).compile() for f in (forward, both)]

    def measure() -> list[float]:
        x = inputs()
        times = _device_milliseconds if on_device else batch_milliseconds
        return [round(times(program, x, x[source]), 4) for program in pair]

    return measure
