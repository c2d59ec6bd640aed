"""Run the Triton kernels of attention in Triton's interpreter, on a CPU with numpy, and compare them with XLA in float32.

    TRITON_INTERPRET=1 python -m tests.kernels.triton_cases_attention [CASE ...]

Prints a line of JSON for each case of `CASES`: its name, the relative RMS error of the output and of every gradient, and the number of
outputs before a token that change when the token and later ones change. `tests/kernels/test_attention_triton.py` starts it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


def trace(words: str, dim: int, heads: tuple[int, int] = (4, 4), dtype: str = "bfloat16") -> None:
    """Trace a call of `attention` by the Triton kernels, and the gradients of all its inputs.

    `words` names the optional arguments: "log_forget", "segment_ids", "window", "state"; with "all" no tiles are pruned.
    """
    from lsm_jax import ops

    struct, given, length = jax.ShapeDtypeStruct, words.split(), 512
    shapes = dict(zip("qkv", (heads[0], heads[1], heads[1]), strict=True))
    x = {n: struct((2, length, h, dim), jnp.dtype(dtype)) for n, h in shapes.items()}
    if "log_forget" in given:
        x["log_forget"] = struct((2, length, heads[0]), jnp.float32)
    ids = struct((2, length), jnp.int32) if "segment_ids" in given else None
    state = None
    if "state" in given:
        gates = heads[0] if "log_forget" in given else None
        state = ops.attention_state(2, 1024, heads[1], dim, dim, forget_heads=gates, dtype=jnp.dtype(dtype))  # fmt: skip

    def both(x, ids):
        def call(x):
            return ops.attention(
                **x, segment_ids=ids, window=300 if "window" in given else None, initial_state=state,
                prune="all" not in given, implementation="triton",
            )[0]  # fmt: skip

        output, pull = jax.vjp(call, x)
        return pull(output)

    with jax.default_matmul_precision("tensorfloat32"):
        jax.eval_shape(both, x, ids)


COMPILED = {
    "attention, 64": functools.partial(trace, "", 64),
    "attention documents, 64": functools.partial(trace, "segment_ids", 64),
    "attention gates documents, 64": functools.partial(trace, "log_forget segment_ids", 64),
    "attention gates, 64": functools.partial(trace, "log_forget", 64),
    "attention, 128": functools.partial(trace, "", 128),
    "attention gates all, 128": functools.partial(trace, "log_forget all", 128),
    "attention gates, 128": functools.partial(trace, "log_forget", 128),
    "attention gates documents, 128": functools.partial(trace, "log_forget segment_ids", 128, (4, 2)),
    "attention gates window, 128": functools.partial(trace, "log_forget window", 128),
    "attention gates state, 128": functools.partial(trace, "log_forget state", 128),
    "attention gates documents, 256": functools.partial(trace, "log_forget segment_ids", 256),
    "attention gates, float16": functools.partial(trace, "log_forget", 128, dtype="float16"),
    "attention gates documents, float32 64": functools.partial(trace, "log_forget segment_ids", 64, dtype="float32"),
    "attention gates documents, float32": functools.partial(trace, "log_forget segment_ids", 128, dtype="float32"),
    "attention gates documents, float32 256": functools.partial(trace, "log_forget segment_ids", 256, dtype="float32"),
}  # fmt: skip
"""Calls of `attention` whose kernels `triton_compiled` compiles, by name."""


def trace_for(capability: str, *arguments, **options) -> None:
    """Trace a call as `trace` does, with the tilings of code for a compute capability."""
    from pallas_kernels.triton import launch

    with launch.code_for(capability):
        trace(*arguments, **options)


COMPILED |= {
    f"{name}, tilings of 8.0": functools.partial(trace_for, "8.0", *case.args, **case.keywords)
    for name, case in COMPILED.items()
    if name in ("attention, 64", "attention gates, 64") or name.endswith((", 128", ", float16"))
}


class Case(NamedTuple):
    """Sizes and options of one call of `attention`.

    Attributes:
        heads: numbers of heads of q and of k and v.
        dim: number of channels of a head.
        length: number of tokens of each row, T.
        dtype: dtype of q, k and v.
        gates: "mild" or "closed" (some gates close completely); None is no gates.
        documents: whether rows have several documents, padding and a mask.
        window: the number of last tokens that a query sees, or None.
        stored: the number of tokens of a state that the call continues from, or None.
        parts: whether only the queries of two parts of the row are computed, as on a device that shares it.
        prune: whether tiles of keys with negligible weights are skipped. The expected values then skip the same tiles.
        capability: the compute capability whose tilings the kernels have; None are those of no card.
        tiling: the tiling of `attend` in place of its table's, as the argument of --tilings of `python -m benchmarks triton_kernels`.
    """

    heads: tuple[int, int] = (1, 1)
    dim: int = 64
    length: int = 200
    dtype: str = "float32"
    gates: str | None = "mild"
    documents: bool = False
    window: int | None = None
    stored: int | None = None
    prune: bool = False
    parts: bool = False
    capability: str | None = None
    tiling: str = ""


_TABLES: list[dict[Any, Any]] = []  # the tables of tilings as they are without a case's

CASES = {
    "gates": Case((2, 1)),
    "gates in blocks": Case(length=2200),
    "no gates": Case((2, 2), gates=None, length=130),
    "documents": Case((2, 1), length=300, documents=True),
    "documents, no gates": Case(length=150, gates=None, documents=True),
    "closed": Case(length=300, gates="closed"),
    "window": Case((2, 1), length=300, window=70),
    "window of one tile": Case(length=390, window=129, gates=None),
    "128": Case((2, 1), 128, 140, documents=True),
    "256": Case((1, 1), 256, 140, documents=True),
    "state": Case((2, 1), length=100, stored=150),
    "state, window": Case(length=100, stored=150, window=80),
    "state, documents": Case(length=140, stored=100, documents=True),
    "pruned": Case((2, 1), length=700, gates="closed", prune=True),
    "pruned, documents": Case(length=500, gates="closed", documents=True, prune=True),
    "parts": Case((2, 1), length=768, parts=True),
    "bfloat16, row": Case(length=64, dtype="bfloat16"),
    "float16, row": Case(length=64, dtype="float16"),
    "bfloat16": Case((2, 1), length=300, dtype="bfloat16", documents=True),
    "bfloat16, 128": Case((1, 1), 128, 150, dtype="bfloat16", prune=True),
    "bfloat16, 256": Case((1, 1), 256, 130, dtype="bfloat16"),
    "bfloat16, pruned": Case((2, 1), length=600, dtype="bfloat16", gates="closed", prune=True),
    "bfloat16, window": Case(length=200, dtype="bfloat16", window=60),
    "float16": Case((2, 1), length=200, dtype="float16", documents=True),
    "float16, state": Case(length=70, stored=64, dtype="float16"),
    "tilings of 8.0, 64": Case(length=300, dtype="bfloat16", capability="8.0"),
    "tilings of 8.0, 128": Case((2, 2), 128, 300, dtype="bfloat16", prune=True, capability="8.0"),
    "tilings of 8.0, all": Case((2, 2), 128, 300, dtype="bfloat16", capability="8.0"),
    "tilings of 8.0, no gates": Case(
        (1, 1), 128, 300, dtype="float16", gates=None, capability="8.0"
    ),
    "tilings of 8.0, documents": Case(
        (1, 1), 128, 300, dtype="float16", documents=True, capability="8.0"
    ),
    "in parts": Case((2, 1), 128, 300, documents=True, tiling="attend/128=128:32:4:3:0:2:8"),
    "in parts, window": Case(length=390, window=129, tiling="attend/64=128:64:4:3:0:2"),
    "in parts, state": Case((2, 1), length=100, stored=150, tiling="attend/64=128:32:4:3:0:4:8"),
    "in parts, pruned": Case(
        (2, 1), length=700, gates="closed", prune=True, tiling="attend/64=128:64:4:3:0:2:8"
    ),
}
"""Cases by name."""


def inputs_of(case: Case) -> tuple[dict[str, jax.Array], dict[str, Any], Any]:
    """Return the arrays that are differentiated, the segment ids and mask, and the state to continue from."""
    from lsm_jax import ops

    rng = np.random.default_rng(0)
    heads, key_heads = case.heads
    rows = 1, case.length

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    def tokens(length):
        x = dict(
            q=normal(1, length, heads, case.dim),
            k=normal(1, length, key_heads, case.dim),
            v=normal(1, length, key_heads, case.dim),
        )
        x = {n: a.astype(case.dtype) for n, a in x.items()}
        if case.gates is not None:
            gate = jax.nn.log_sigmoid(normal(1, length, heads) + 3)
            if case.gates == "closed":
                gate = jnp.where(rng.random(gate.shape) < 0.02, -5000.0, gate)
            x["log_forget"] = gate
        return x

    state = None
    if case.stored is not None:
        capacity = case.window or case.stored + case.length
        forget_heads = None if case.gates is None else heads
        state = ops.attention_state(
            1, capacity, key_heads, case.dim, case.dim, forget_heads=forget_heads, dtype=jnp.dtype(case.dtype),
        )  # fmt: skip
        _, state = ops.attention(
            **tokens(case.stored), window=case.window, initial_state=state, implementation="xla"
        )
    x = tokens(case.length)
    marks: dict[str, Any] = {}
    if case.documents:
        starts = np.isin(np.arange(case.length), [20, 21, 64, 90, 128, 140])
        ids = 1 + np.cumsum(starts)[None]
        ids[0, 30:33] = 0
        marks["segment_ids"] = jnp.asarray(ids, jnp.int32)
        marks["update_mask"] = jnp.asarray(rng.random(rows) < 0.8)
        if state is not None:
            state = state._replace(segment_id=jnp.ones(1, jnp.int32))
    return x, marks, state


def run(case: Case, x, marks, state, implementation: str) -> jax.Array:
    """Return the output of `attention` for arrays of `inputs_of`."""
    from lsm_jax import ops

    if state is not None:
        state = state._replace(keys=state.keys.astype(x["k"].dtype), values=state.values.astype(x["v"].dtype))  # fmt: skip
    return ops.attention(
        **x, **marks, window=case.window, initial_state=state, prune=case.prune, implementation=implementation,
    )[0]  # fmt: skip


def attend_densely(q, k, v, rows, bounds, scale: float) -> jax.Array:
    """Compute attention with forget gates from a score for every query and key, without the tiles that `bounds` hides; the arguments
    are those of the kernels, with as many queries as keys.
    """
    heads, length = q.shape[2], q.shape[1]
    k, v = (jnp.repeat(x, heads // x.shape[2], 2).astype(jnp.float32) for x in (k, v))
    scores = scale * jnp.einsum("bihd,bjhd->bhij", q.astype(jnp.float32), k, precision="highest")
    high, low = rows.gates
    stopped = jax.lax.stop_gradient(rows.gates)
    scores += (stopped[0][..., None] - high[..., None, :]) + (
        stopped[1][..., None] - low[..., None, :]
    )
    i, j = jnp.arange(length)[:, None], jnp.arange(length)
    seen = (j <= i) & (j // 128 >= bounds.first_of_query[..., None])
    if rows.run is not None:
        seen = seen & (rows.run[:, None, :, None] == rows.run[:, None, None, :])
    if rows.written is not None:
        seen = seen & rows.written[:, None, None, :]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
    weights = jnp.where(seen, weights, 0)
    return jnp.einsum("bhij,bjhd->bihd", weights, v, precision="highest")


def run_parts(x, implementation: str) -> jax.Array:
    """Return the output of `attention` for the tokens 128 to 255 and 640 to 767 of rows of 768 tokens: by `forgetting_attention` with
    these queries alone, or of all tokens by XLA.
    """
    from lsm_jax import ops
    from lsm_jax.ops.attention.forget_gates import GateSum, sum_gates
    from lsm_jax.ops.core.segments import read_tokens
    from pallas_kernels.forgetting_attention import forgetting_attention

    def parts(a):
        return jnp.concatenate([a[:, 128:256], a[:, 640:]], axis=1)

    if implementation == "xla":
        return parts(ops.attention(**x, implementation="xla")[0])
    zero = jnp.zeros((1, x["log_forget"].shape[2]), jnp.float32)
    tokens = read_tokens(None, None, jnp.zeros(1, jnp.int32), None)
    sums = sum_gates(x["log_forget"], tokens, GateSum(zero, zero))
    return forgetting_attention(
        parts(x["q"]), x["k"], x["v"], sums, places=jnp.asarray([128, 640]),
        scale=x["q"].shape[-1] ** -0.5, prune=False, implementation="triton",
    )  # fmt: skip


def run_pruned(x, marks, implementation: str) -> jax.Array:
    """Return the output of `forgetting_attention` with pruning for arrays of `inputs_of`, of the Triton kernels or ("dense") of
    `attend_densely` in float32.
    """
    from pallas_kernels.forgetting_attention import forgetting_attention
    from pallas_kernels.forgetting_attention.bounds import Rows, find_bounds

    q, k, v = (x[n] for n in "qkv")
    run, written = None, None
    gates = jnp.maximum(x["log_forget"], -4096.0)
    if marks:
        gates = jnp.where(marks["update_mask"][..., None], gates, 0)
        ids = marks["segment_ids"]
        run = jax.lax.cummax(
            jnp.cumsum(jnp.diff(ids, axis=1, prepend=ids[:, :1]) > 0, axis=1), axis=1
        )
        written = marks["update_mask"]
    sums = jnp.cumsum(gates, axis=1)
    sums = sums, jnp.zeros_like(sums)
    options: Any = dict(window=None, scale=q.shape[-1] ** -0.5, prune=True)
    if implementation == "triton":
        return forgetting_attention(
            q, k, v, sums, run=run, written=written, implementation="triton", **options
        )
    length = q.shape[1]
    padding = [(0, 0), (0, -length % 128), (0, 0), (0, 0)]
    edge = lambda a, axis: jnp.pad(a, [(0, -length % 128 if n == axis else 0) for n in range(a.ndim)], mode="edge")  # noqa: E731  # fmt: skip
    q, k, v = (jnp.pad(a, padding) for a in (q, k, v))
    sums = tuple(edge(jnp.swapaxes(a, 1, 2), 2) for a in sums)
    rows = Rows(
        sums,
        None if run is None else edge(run, 1),
        None if written is None else jnp.pad(written, padding[:2]),
    )
    bounds = jax.lax.stop_gradient(find_bounds(q, k, rows, **options))
    assert int(jnp.max(bounds.first_of_query)) > 1
    return attend_densely(q, k, v, rows, bounds, options["scale"])[:, :length]


def compare(case: Case) -> dict[str, float]:
    """Return the errors of one case, and the number of its outputs that are not causal."""
    from tests.kernels.triton_interpreted import error

    x, marks, state = inputs_of(case)
    exactly = case.prune and case.dtype == "float32"

    def fused(x):
        if case.parts:
            return run_parts(x, "triton")
        return run_pruned(x, marks, "triton") if exactly else run(case, x, marks, state, "triton")

    def expected(x):
        if case.parts:
            return run_parts(x, "xla")
        return run_pruned(x, marks, "dense") if exactly else run(case, x, marks, state, "xla")

    actual, pull = jax.vjp(fused, x)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), x)
    output, wanted_pull = jax.vjp(expected, wide)
    rng = np.random.default_rng(1)
    cotangent = jnp.asarray(rng.normal(size=actual.shape), actual.dtype)
    (gradients,), (wanted,) = pull(cotangent), wanted_pull(cotangent.astype(jnp.float32))
    errors = dict(output=error(actual, output))
    errors |= {f"d_{n}": error(a, wanted[n]) for n, a in gradients.items()}
    place = case.length * 2 // 3
    before = 128 if case.parts else place
    changed = {n: a.at[:, place:].multiply(2) for n, a in x.items()}
    later = np.asarray(fused(changed))[:, :before]
    return errors | dict(not_causal=int(np.sum(later != np.asarray(actual)[:, :before])))


def use_tiling(case: Case) -> None:
    """Replace the tiling of `attend` by the case's, or by its table's; also that of float32."""
    from benchmarks import triton_attention
    from pallas_kernels.forgetting_attention.triton import passes

    tables = passes.TILINGS, passes.TILINGS_8_0, passes.EQUAL_HEADS_8_0, passes.WIDE_TILINGS
    if not _TABLES:
        _TABLES.extend(dict(table) for table in tables)
    for table, first in zip(tables, _TABLES, strict=True):
        table.clear()
        table.update(first)
    if case.tiling:
        name, _, sizes = case.tiling.partition("=")
        numbers = [int(n) for n in sizes.split(":")]
        assert triton_attention.set_tiling(case.tiling, name, numbers) is None
        passes.TILINGS.pop(("attend_limited", case.dim), None)
        key = "attend", case.dim
        passes.TILINGS[key] = passes.WIDE_TILINGS[key] = passes.Tiling(*numbers)


def main() -> None:
    """Compare the cases that the command line names, or all."""
    from pallas_kernels.forgetting_attention.triton import requirements
    from pallas_kernels.triton import launch
    from pallas_kernels.triton.host import compute_bfloat16_exactly

    # Without jit: a compiled program waits for its callbacks in the threads that they need.
    module = importlib.import_module("lsm_jax.ops.attention.attention")
    module.attend = module.attend.__wrapped__
    compute_bfloat16_exactly()
    requirements.REQUIREMENTS = ()  # float32 too, whose products are exact here
    for name in sys.argv[1:] or CASES:
        case = CASES[name]
        use_tiling(case)
        with launch.code_for(case.capability) if case.capability else contextlib.nullcontext():
            print(json.dumps(dict(case=name, **compare(case))), flush=True)


if __name__ == "__main__":
    main()
