"""Causal softmax attention whose keys lose weight by forget gates, as one fused kernel (FoX, arXiv
2503.02130, Eq. 3). The score of query i and key j is `scale q_i . k_j + F_i - F_j`, with F the running sum of
the log forget gates.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.forgetting_attention.bounds import Bounds, Rows, find_bounds
from pallas_kernels.requirements import Requirement, first_unmet
from pallas_kernels.residuals import name_residuals

_BACKENDS = {"mosaic_gpu": "hopper", "mosaic_tpu": "tpu", "triton": "triton"}


class Call(NamedTuple):
    """The arguments of a call of `forgetting_attention` by which a backend decides whether it supports the
    call: queries q, keys k and values v (arrays, or their shapes and dtypes), and the number of keys before
    the row, `earlier`.
    """

    q: Any
    k: Any
    v: Any
    earlier: int = 0

    @property
    def row_length(self) -> int:
        """The number of keys that belong to the row itself, T - `earlier`: without the keys before it, which
        come from a state.
        """
        return self.k.shape[1] - self.earlier


REQUIREMENTS = (
    Requirement(
        "as many key heads as value heads, a divisor of the query heads",
        lambda c: c.k.shape[2] == c.v.shape[2] and c.q.shape[2] % c.v.shape[2] == 0,
        lambda c: f"{c.k.shape[2]} and {c.v.shape[2]} for {c.q.shape[2]} query heads",
    ),
)
"""The requirements of every backend; the `REQUIREMENTS` of each backend are checked after these."""


def _backend(implementation: str) -> Any:
    # Imported on first use: a backend that is never used costs nothing.
    return importlib.import_module(
        f"pallas_kernels.forgetting_attention.{_BACKENDS[implementation]}"
    )


def unsupported(implementation: str, q, k, v, *, earlier: int = 0) -> str | None:
    """Return the first requirement that a call of `forgetting_attention` with these queries q, keys k and
    values v (arrays, or their shapes and dtypes) does not meet, or None if the backend supports it.

    Only the module of the backend that `implementation` names is imported.
    """
    call = Call(q, k, v, earlier)
    return first_unmet(REQUIREMENTS, call) or _backend(implementation).unsupported(call)


def forgetting_attention(
    q: Float[Array, "B Q H D"],
    k: Float[Array, "B T G D"],
    v: Float[Array, "B T G V"],
    sums: tuple[Float[Array, "B T H"], Float[Array, "B T H"]] | None = None,
    *,
    run: Int[Array, "B T"] | None = None,
    written: Bool[Array, "B T"] | None = None,
    places: Int[Array, " 2"] | None = None,
    earlier: int = 0,
    window: int | None = None,
    scale: float,
    prune: bool = True,
    implementation: str = "mosaic_gpu",
    interpret: Any = False,
) -> Float[Array, "B Q H V"]:
    """Compute causal softmax attention whose keys lose weight by forget gates, [B, Q, H, V]. Differentiable
    once, in reverse mode.

    Args:
        q: [B, Q, H, D] queries; H is a multiple of G, Q is T - `earlier`, or less with `places`.
        k: [B, T, G, D] keys.
        v: [B, T, G, V] values.
        sums: the high and the low part of F, each [B, T, H] float32; F is the sum of the log forget gates up
            to and including each token. F must not increase along T, not even between documents, and must not
            decrease by more than some thousands from token to token (adding a larger float32 bias would round
            scores away). The gradient of F is that of the biases -F_j of the keys, and is returned on the
            high part; the gradient of the biases F_i of the queries is 0. None is no gate.
        run: [B, T], the index of each token's document in its row, not decreasing along T: a token sees the
            tokens of its document. None is one document.
        written: [B, T], False where a token is not a key. None means that all tokens are keys.
        places: [2], the positions in the row at which the first and the second half of the queries begin,
            multiples of the backend's tile, for a device that has the queries of only these two parts of the
            row. Required where Q < T - `earlier`.
        earlier: the number of keys before the row: the first `earlier` of the T tokens have a key and no
            query, as those of a state. The row begins after them: `places` count from there.
        window: each token sees the last `window` tokens, including itself; None means that it sees all
            earlier tokens.
        scale: the factor by which the scores q . k are multiplied.
        prune: whether to skip tiles of keys that together weigh less than e^-10 of the sum of a query's
            weights (arXiv 2504.06949).
        implementation: "mosaic_gpu" (Hopper; heads of 256 channels have no gradient), "mosaic_tpu" or
            "triton" (other NVIDIA cards); `REQUIREMENTS` here and of the backend list the requirements.
        interpret: parameters of the backend's interpreter, to run on a CPU.

    Returns:
        The attention's output [B, Q, H, V] in q's dtype, 0 where a token sees no key.

    Raises:
        NotImplementedError: the arrays given to `forgetting_attention`, or a gradient of it, do not meet a
        requirement of the kernel's backend; the message says which.
        ValueError: `implementation` is not the name of a backend of `forgetting_attention`; there are fewer
        queries than tokens of the row without `places`, or as many with `places`; there are more `earlier`
        keys than keys.
    """
    if implementation not in _BACKENDS:
        accepted = tuple(_BACKENDS)
        raise ValueError(
            f"forgetting_attention: implementation={implementation!r}; accepted are {accepted}"
        )
    (queries, heads), length = q.shape[1:3], k.shape[1]
    if not 0 <= earlier <= length:
        raise ValueError(
            f"forgetting_attention: earlier={earlier}; accepted are 0 to the number of keys, {length}"
        )
    if (places is None) != (queries == length - earlier):
        given = "not given" if places is None else "given"
        raise ValueError(
            f"forgetting_attention: places is {given} with {queries} queries and {length - earlier} keys; "
            "it is required where there are fewer queries than keys, and accepted nowhere else"
        )
    if (requirement := unsupported(implementation, q, k, v, earlier=earlier)) is not None:
        raise NotImplementedError(
            f"forgetting_attention: implementation={implementation!r} requires {requirement}"
        )
    backend = _backend(implementation)
    gates: Any = None if sums is None else tuple(jnp.swapaxes(x, 1, 2) for x in sums)
    if written is not None and gates is None:
        gates = (jnp.zeros((q.shape[0], heads, length), jnp.float32),) * 2
    tile_size = backend.tile(length)
    # Without gates no tile is negligible.
    options = _Options(backend, tile_size, scale, window, prune and sums is not None, interpret)
    rows = Rows(gates, run, written, places)
    if earlier:
        padded = _pad_earlier(q, k, v, rows, earlier, tile_size)
    else:
        padded = _pad(-length % tile_size, q, k, v, rows)
    return _attend(options, *padded)[:, :queries]


def _pad(padding: int, q, k, v, rows: Rows) -> tuple[Any, Any, Any, Rows]:
    """Return queries q, keys k, values v and the arrays of `rows` with `padding` tokens appended, so that T
    becomes a multiple of the tile size. As keys, the added tokens come after all queries whose output is
    returned, so that none of these sees them.
    """
    if padding == 0:
        return q, k, v, rows

    def pad(x: Any, axis: int = 1, mode: Any = "constant") -> Any:
        widths = [(0, padding if i == axis else 0) for i in range(x.ndim)]
        return jnp.pad(x, widths, mode=mode)

    gates = None if rows.gates is None else tuple(pad(x, 2, "edge") for x in rows.gates)
    run = None if rows.run is None else pad(rows.run, mode="edge")
    written = None if rows.written is None else pad(rows.written)
    return pad(q), pad(k), pad(v), rows._replace(gates=gates, run=run, written=written)


def _pad_earlier(q, k, v, rows: Rows, earlier: int, tile_size: int) -> tuple[Any, Any, Any, Rows]:
    """Return q, k, v and `rows` of a call with `earlier` keys before the row, padded so that the queries are
    two halves, each of which begins at a multiple of the tile size among the keys.

    Tokens are added in front of the earlier keys, in a document that no query sees, and after the row, where
    they are keys after all queries whose output is returned.
    """
    front, back = -earlier % tile_size, 0
    places = rows.places
    if places is None:  # all tokens of the row: its first and its second half
        back = -q.shape[1] % (2 * tile_size)
        places = jnp.array([0, (q.shape[1] + back) // 2], jnp.int32)

    def pad(x: Any, axis: int = 1, mode: Any = "constant") -> Any:
        widths = [(front, back) if i == axis else (0, 0) for i in range(x.ndim)]
        return jnp.pad(x, widths, mode=mode)

    run, gates = rows.run, rows.gates
    if run is None and front:
        run = jnp.zeros(k.shape[:2], jnp.int32)
    if run is not None:
        run = pad(run, mode="edge") - (jnp.arange(front + k.shape[1] + back) < front)
    padded = Rows(
        gates=None if gates is None else (pad(gates[0], 2, "edge"), pad(gates[1], 2, "edge")),
        run=run,
        written=None if rows.written is None else pad(rows.written),
        places=places + (front + earlier),
    )
    return jnp.pad(q, [(0, 0), (0, back), (0, 0), (0, 0)]), pad(k), pad(v), padded


class _Options(NamedTuple):
    """The arguments of a call of `forgetting_attention` that are not arrays (scale of the scores, window in
    tokens, whether to prune, the interpreter), with the backend's module and the tokens of its tiles.
    """

    backend: Any
    tile_size: int
    scale: float
    window: int | None
    prune: bool
    interpret: Any

    def bounds(self, q, k, rows: Rows) -> Bounds:
        """Return, as `Bounds`, the range of key tiles that each tile of queries must read, and the range of
        query tiles that each tile of keys must read: documents, the window and pruning exclude the others.
        """
        options: Any = dict(scale=self.scale, window=self.window, prune=self.prune)
        return find_bounds(q, k, rows, **options, tile_size=self.tile_size)

    def kernel_options(self) -> dict[str, Any]:
        """Return the keyword arguments that the backend's `forward` and `backward` have in common: the scale
        of the scores, the window in tokens, and the interpreter.
        """
        return dict(scale=self.scale, window=self.window, interpret=self.interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, q, k, v, rows: Rows):
    bounds = options.bounds(q, k, rows)
    return options.backend.forward(q, k, v, rows, bounds, **options.kernel_options())[0]


def _attend_forward(options, q, k, v, rows: Rows):
    bounds = options.bounds(q, k, rows)
    output, sums = options.backend.forward(q, k, v, rows, bounds, **options.kernel_options())
    bounds, output, sums = name_residuals((bounds, output, sums))
    return output, (q, k, v, rows, bounds, output, sums)


def _attend_backward(options, saved, d_output):
    q, k, v, rows, bounds, output, sums = saved
    delta = jnp.einsum(
        "bthd,bthd->bht", output, d_output, precision="highest", preferred_element_type=jnp.float32
    )
    inputs = (q, k, v, rows, bounds, sums, d_output, delta)
    dq, dk, dv, d_high = options.backend.backward(*inputs, **options.kernel_options())

    def sum_queries(x, like):
        """Sum x, the gradient of keys or values for each query head [B, T, H, D], over the query heads that
        share a key head; return it in the shape [B, T, G, D] and the dtype of `like`, summed in float32.
        """
        by_head = x.reshape(*like.shape[:3], -1, like.shape[3])
        return jnp.sum(by_head, axis=3, dtype=jnp.float32).astype(like.dtype)

    d_gates = None if rows.gates is None else (d_high, jnp.zeros_like(d_high))
    return dq, sum_queries(dk, k), sum_queries(dv, v), Rows(d_gates, None, None, None)


_attend.defvjp(_attend_forward, _attend_backward)
