"""Run the Triton kernels of `selective_memory`, `short_convolution` and one-token steps in Triton's interpreter, on a CPU with numpy, and
compare them with XLA in float32.

    TRITON_INTERPRET=1 python -m tests.kernels.triton_interpreted_tokens [CASE ...]

Prints a line of JSON for each case of `CASES`: its name, the relative RMS error of every output and gradient, and the number of outputs
before a token that change when the token and later ones change. The interpreter must be switched on before Triton is imported, so
that it has a process of its own; `tests/kernels/test_triton_token_ops.py` starts it.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.calls.tokens import one_token, one_token_inputs
from pallas_kernels.decode_step.cases import Case as OneToken
from tests.kernels.triton_interpreted import error


class Selective(NamedTuple):
    """Sizes and options of one call of `selective_memory`.

    Attributes:
        length: number of tokens of each row, T.
        states: number of entries of a channel's memory, N.
        dtype: dtype of u.
        documents: whether rows have several documents, padding and a mask.
        strong: whether some tokens have decays of about e^-30.
        parts: number of parts into which a row is divided.
        channels: number of channels, D.
        batch: number of rows, B.
    """

    length: int
    states: int = 16
    dtype: str = "float32"
    documents: bool = True
    strong: bool = False
    parts: int = 100
    channels: int = 64
    batch: int = 1


class Convolution(NamedTuple):
    """Sizes and options of one call of `short_convolution`.

    Attributes:
        length: number of tokens of each row, T.
        width: number of tokens over which the convolution sums, W.
        dtype: dtype of x.
        documents: whether rows have several documents with padding between them.
        bias: whether there is a bias.
        silu: whether SiLU is applied.
        head_dim: number of channels of a head that is normalised, or None.
        channels: number of channels, D.
        batch: number of rows, B.
        tokens: number of tokens of a program's block.
    """

    length: int
    width: int = 4
    dtype: str = "float32"
    documents: bool = True
    bias: bool = True
    silu: bool = True
    head_dim: int | None = None
    channels: int = 64
    batch: int = 1
    tokens: int = 64


class Token(NamedTuple):
    """One token of each row through the memories of an op.

    Attributes:
        case: the sizes and options of the call.
        dtype: dtype of q, k and v.
    """

    case: OneToken
    dtype: str


def _token(*fields: Any) -> Token:
    """Return the case of one token with the fields of `OneToken`, the last of which is the dtype."""
    return Token(OneToken(*fields), jnp.dtype(fields[-1]).name)


CASES: dict[str, Any] = {
    "selective": Selective(70),
    "selective, float32": Selective(33),
    "selective, one part": Selective(70, dtype="bfloat16", parts=1, channels=128),
    "selective, two parts": Selective(100, 8, parts=2, documents=False),
    "selective, float16": Selective(33, dtype="float16", batch=2),
    "selective, 32": Selective(64, 32, "bfloat16"),
    "selective, strong": Selective(96, strong=True),
    "convolution": Convolution(27, head_dim=32, tokens=12),
    "convolution, bfloat16": Convolution(70, dtype="bfloat16", documents=False, channels=128),
    "convolution, float16": Convolution(70, 3, "float16", head_dim=64),
    "convolution, linear": Convolution(201, 2, silu=False, bias=False, batch=2),
    "convolution, rows": Convolution(101, head_dim=32, batch=2),
    "convolution, blocks": Convolution(150, 3, "bfloat16", head_dim=64, channels=128),
    "convolution, one token": Convolution(1, documents=False),
    "convolution, two tokens": Convolution(2, dtype="bfloat16", head_dim=32, batch=3),
    "convolution, three tokens": Convolution(3, 3, bias=False, channels=128, tokens=4),
    "convolution, short": Convolution(63, 4, "float16", head_dim=64),
    "convolution, plain": Convolution(64, 4, documents=False, silu=False, bias=False),
    "token, bonus": _token("linear", (2, 2, 2), 32, 64, "key bonus", False, True, jnp.bfloat16),
    "token, float16": _token("linear", (4, 2, 2), 64, 64, "token", True, False, jnp.float16),
    "token, value": _token(
        "linear", (2, 1, 4), 48, 32, "strong value token", True, True, jnp.float32
    ),
    "token, none": _token("linear", (2, 1, 2), 256, 32, "", False, False, jnp.bfloat16),
    "token, delta": _token("delta", (1, 1, 2), 64, 32, "token", True, True, jnp.float32),
    "token, kda": _token("delta", (2, 2, 4), 128, 64, "strong key", True, False, jnp.bfloat16),
    "token, undecayed": _token(
        "undecayed delta", (1, 1, 2), 64, 32, "strong token", True, True, jnp.float32
    ),
    "token, dplr": _token("dplr", (4, 2, 2), 32, 64, "strong key", True, True, jnp.bfloat16),
    "convolution, wide": Convolution(300, dtype="bfloat16", head_dim=256, channels=256, bias=False),
}


def _normal(rng: np.random.Generator) -> Callable[..., jax.Array]:
    return lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)


def marks_of(rng: np.random.Generator, batch: int, length: int) -> dict[str, jax.Array]:
    """Return segment ids with documents of 1, 2 and more tokens and padding between them and at the end, and a mask. Rows of fewer than 24
    tokens have two documents with a token of padding between them.
    """
    ends = [length // 4, 1, 2, length // 4, 3, length // 4]
    ids = np.repeat([1, 2, 3, 4, 0, 5], ends)
    if length < 24:
        ids = np.repeat([1, 0, 2], [max(0, length - 2), int(length > 1), 1])
    ids = np.concatenate([ids, np.zeros(length - len(ids), int)])
    rows = np.stack([np.roll(ids, 3 * row) if row else ids for row in range(batch)])
    mask = rng.random((batch, length)) < 0.9
    return dict(segment_ids=jnp.asarray(rows, jnp.int32), update_mask=jnp.asarray(mask))


def compare(run: Callable[..., tuple], x: dict[str, Any], of_rows: tuple[str, ...], length: int) -> dict[str, float]:  # fmt: skip
    """Return the errors of the outputs and gradients of `run(implementation, x)`, whose results are arrays, the first [B, T, ...].

    Args:
        run: a function of an implementation and of arrays by name.
        x: the arrays that are differentiated.
        of_rows: the names of those that have an axis of tokens.
        length: the number of tokens.
    """
    actual, pull = jax.vjp(lambda x: run("triton", x), x)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), x)
    expected, wanted_pull = jax.vjp(lambda x: run("xla", x), wide)
    rng = np.random.default_rng(1)
    cotangents = [jnp.asarray(rng.normal(size=a.shape), a.dtype) for a in actual]
    (gradients,) = pull(tuple(cotangents))
    (wanted,) = wanted_pull(tuple(a.astype(jnp.float32) for a in cotangents))
    errors = {n: error(a, b) for n, a, b in zip(("output", "final"), actual, expected, strict=False)}  # fmt: skip
    errors |= {f"d_{n}": error(a, wanted[n]) for n, a in gradients.items()}
    place = length * 2 // 3
    changed = {n: a.at[:, place:].multiply(2) if n in of_rows else a for n, a in x.items()}
    outputs = [np.asarray(run("triton", y)[0])[:, :place] for y in (x, changed)]
    return errors | dict(not_causal=int(np.sum(outputs[0] != outputs[1])))


def compare_selective(case: Selective) -> dict[str, float]:
    """Return the errors of one case of `selective_memory`."""
    from lsm_jax import ops
    from pallas_kernels.selective_scan.triton import real

    real._FULL = 0 if case.parts == 1 else 10**6
    real._PROGRAMS = case.parts * case.batch * case.channels // 64
    rng = np.random.default_rng(0)
    normal, rows = _normal(rng), (case.batch, case.length)
    delta = jax.nn.softplus(normal(*rows, case.channels) - 2)
    if case.strong:
        delta = jnp.where(jnp.asarray(rng.random((*rows, 1)) < 0.1), 30.0, delta)
    x = dict(
        u=normal(*rows, case.channels).astype(case.dtype),
        delta=delta,
        A=-jnp.exp(normal(case.channels, case.states)),
        B=normal(*rows, case.states),
        C=normal(*rows, case.states),
        D=normal(case.channels),
        memory=normal(case.batch, case.channels, case.states),
    )
    marks = marks_of(rng, *rows) if case.documents else {}

    def run(implementation, x):
        x = dict(x)
        state = ops.selective_state(case.batch, case.channels, case.states)
        state = state._replace(memory=x.pop("memory"))
        if case.documents:
            state = state._replace(segment_id=jnp.ones(case.batch, jnp.int32))
        form = "recurrent" if implementation == "xla" else "chunk"
        output, state = ops.selective_memory(
            **x, **marks, initial_state=state, form=form, implementation=implementation
        )
        return output, state.memory

    return compare(run, x, ("u", "delta", "B", "C"), case.length)


def compare_convolution(case: Convolution) -> dict[str, float]:
    """Return the errors of one case of `short_convolution`."""
    from lsm_jax import ops
    from pallas_kernels.short_convolution import triton

    for name, tiling in triton.TILINGS.items():
        triton.TILINGS[name] = tiling._replace(tokens=case.tokens)

    rng = np.random.default_rng(0)
    normal, rows = _normal(rng), (case.batch, case.length)
    x = dict(
        x=normal(*rows, case.channels).astype(case.dtype),
        weight=normal(case.width, case.channels),
        tail=normal(case.batch, case.width - 1, case.channels).astype(case.dtype),
    )
    if case.bias:
        x["bias"] = normal(case.channels)
    ids = marks_of(rng, *rows)["segment_ids"] if case.documents else None

    def run(implementation, x):
        x = dict(x)
        tail = x.pop("tail")
        state = ops.ShiftState(tail, jnp.ones(case.batch, jnp.int32))
        output, state = ops.short_convolution(
            **x,
            silu=case.silu,
            head_dim=case.head_dim,
            initial_state=state,
            segment_ids=ids,
            implementation=implementation,
        )
        return output, state.tail

    return compare(run, x, ("x",), case.length)


def compare_token(token: Token) -> dict[str, float]:
    """Return the errors of one token's output and memories, and the number of entries of other layers' memories, and of rows whose token
    does not write, that change.
    """
    op, heads, key_dim, value_dim, decays, documents, stacked, dtype, batch = token.case
    arrays = one_token_inputs(op, heads, key_dim, value_dim, decays, documents, dtype, batch)
    wide = {n: x if "id" in n or "mask" in n else x.astype(jnp.float32) for n, x in arrays.items()}
    output, memory = one_token(op, arrays, stacked=stacked, implementation="triton")
    expected = one_token(op, wide, stacked=stacked, implementation="xla", form="recurrent")
    changed = 0
    if stacked:
        others = jnp.stack([-arrays["memory"], 2 * arrays["memory"]])
        changed += int(jnp.sum(memory[::2] != others))
    if documents:
        after = memory[1] if stacked else memory
        changed += int(jnp.sum(after[:2] != arrays["memory"][:2]))
    return dict(
        output=error(output, expected[0]), final=error(memory, expected[1]), not_causal=changed
    )


COMPARE: dict[type, Callable[[Any], dict[str, float]]] = {
    Selective: compare_selective,
    Convolution: compare_convolution,
    Token: compare_token,
}


def main() -> None:
    """Compare the cases that the command line names, or all."""
    from pallas_kernels.triton.host import compute_bfloat16_exactly

    # Without jit: a compiled program waits for its callbacks in the threads that they need.
    for name in ("selective.selective_memory", "linear.linear_memory", "delta.delta_memory", "delta.dplr_memory"):  # fmt: skip
        module = importlib.import_module(f"lsm_jax.ops.{name}")
        module.run = module.run.__wrapped__
    compute_bfloat16_exactly()
    for name in sys.argv[1:] or CASES:
        case = CASES[name]
        print(json.dumps(dict(case=name, **COMPARE[type(case)](case))), flush=True)


if __name__ == "__main__":
    main()
