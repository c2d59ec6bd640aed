"""Linear attention, `S_t = e^{g_t} S_{t-1} + k_tᵀ v_t`, `o_t = scale q_t S_t`, with no decay, a scalar one or one of each key
or value channel, as fused kernels.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from pallas_kernels.residuals import keep

_BACKENDS = {"mosaic_gpu": "hopper", "mosaic_tpu": "tpu"}


def _choose(implementation: str, log_decay, value_log_decay) -> str:
    name = _BACKENDS[implementation]
    if value_log_decay is not None:
        return f"{name}_values"
    return f"{name}_channels" if log_decay is not None and len(log_decay.shape) == 4 else name


def _backend(name: str) -> Any:
    # Imported where it is used: a backend that is never asked for costs nothing.
    return importlib.import_module(f"pallas_kernels.linear_attention.{name}")


def _widths(name: str, q, v) -> tuple[int, int]:
    """Of the pieces of keys and of values that a backend is given: Hopper's take 128 channels of those that decay one by one, and
    of values that go with them, unless it cuts these itself."""
    key_dim, value_dim = q.shape[3], v.shape[3]
    keys = 128 if name in ("hopper_channels", "hopper_values") and key_dim % 128 == 0 else key_dim
    cut = name == "hopper_values" or name == "hopper_channels" and q.shape[2] > v.shape[2]
    values = 128 if cut and value_dim % 128 == 0 else value_dim
    return keys, values


def reasons(
    q, k, v, log_decay, run, initial, bonus=None, value_log_decay=None
) -> dict[str, str | None]:
    """By implementation, what it takes in place of these arguments (arrays or their shapes); None if it serves them."""
    inputs = q, k, v, log_decay, run, initial, bonus, value_log_decay
    return {name: reason(name, *inputs) for name in _BACKENDS}


def reason(
    implementation, q, k, v, log_decay, run, initial, bonus, value_log_decay=None
) -> str | None:
    """What one implementation takes in place of these arguments, or None; the others' backends are not imported."""
    name = _choose(implementation, log_decay, value_log_decay)
    backend = _backend(name)
    if value_log_decay is not None:
        if log_decay is not None:
            return "log_decay or value_log_decay, not both"
        log_decay = value_log_decay
    if bonus is not None and not getattr(backend, "TAKES_BONUS", False):
        return "a bonus with log_decay [B, T, G, K] alone"

    def padded(x):
        if x is None:
            return None
        length = x.shape[1] + -x.shape[1] % backend.CHUNK
        return jax.ShapeDtypeStruct((x.shape[0], length, *x.shape[2:]), x.dtype)

    keys, values = _widths(name, q, v)
    q, k = (jax.ShapeDtypeStruct((*x.shape[:3], keys), x.dtype) for x in (q, k))
    v = jax.ShapeDtypeStruct((*v.shape[:3], values), v.dtype)
    if hasattr(backend, "served_width"):
        v = jax.ShapeDtypeStruct((*v.shape[:3], backend.served_width(q, v)), v.dtype)
    inputs = (padded(x) for x in (q, k, v, log_decay, run))
    return backend.reason(*inputs, jax.ShapeDtypeStruct(initial.shape, initial.dtype))


def linear_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T G V"],
    log_decay: Float[Array, "B T G"] | Float[Array, "B T G K"] | None = None,
    *,
    initial: Float[Array, "R G K V"],
    run: Int[Array, "B T"] | None = None,
    bonus: Float[Array, "G K"] | None = None,
    value_log_decay: Float[Array, "B T G V"] | None = None,
    scale: float,
    exact: bool = False,
    implementation: str = "mosaic_gpu",
    interpret: Any = False,
) -> tuple[Float[Array, "B T max(H,G) V"], Float[Array, "R G K V"]]:
    """Write `kᵀ v` into decaying memories and read them with `q`; differentiable once, in reverse.

    Args:
        q: [B, T, H, K] queries; H is a multiple or a divisor of G.
        k: [B, T, Hk, K] keys; Hk divides G.
        v: [B, T, G, V] values, one memory for each of the G heads.
        log_decay: [B, T, G] or [B, T, G, K] float32, natural logarithm, at most 0; None is no decay.
        initial: [B, G, K, V] float32, the memory before the first token; or [B * S, G, K, V], S of them a row.
        run: [B, T], growing along T: a token with a larger run than the one before it finds an empty memory, and run 0 goes on
            from `initial`. None is one run. With S memories a row: every number from 0 to S - 1, each run beginning at a multiple
            of 64 ("mosaic_gpu") or 128 ("mosaic_tpu") tokens, going on from the memory of its number and leaving a final one.
        bonus: [G, K] float32. If given, a read comes before decay and write and sees its own token through `q diag(bonus) kᵀ v`.
        value_log_decay: [B, T, G, V] float32, a decay of the value channels, in place of `log_decay`.
        scale: multiplies q.
        exact: the output in float32. Where "mosaic_gpu" has `value_log_decay` it was never rounded, and v may be float32: only a
            memory rounds it then.
        implementation: "mosaic_gpu" (Hopper; bfloat16, K and V of 64 or 128, and with no decay or a scalar one of 256 or 512; with
            a decay a channel both of 64 or any multiple of 128) or "mosaic_tpu" (bfloat16 or float32, K and V a multiple of 8 up to
            256); `reasons` says what each takes.
        interpret: parameters of the backend's interpreter, to run on a CPU.

    Returns:
        The output in v's dtype (float32 if `exact`), and the final memories in float32, as `initial`.

    Raises:
        NotImplementedError: the implementation does not serve these arguments; the message says why.
        ValueError: an implementation that does not exist.
    """
    if implementation not in _BACKENDS:
        raise ValueError(
            f"linear_attention: implementation={implementation!r}; accepted are {tuple(_BACKENDS)}"
        )
    asked = v
    if exact and value_log_decay is not None and implementation == "mosaic_gpu":
        asked = jax.ShapeDtypeStruct(v.shape, q.dtype)
    why = reason(implementation, q, k, asked, log_decay, run, initial, bonus, value_log_decay)
    if why is not None:
        raise NotImplementedError(
            f"linear_attention: implementation={implementation!r} takes {why}"
        )
    name = _choose(implementation, log_decay, value_log_decay)
    log_decay = log_decay if value_log_decay is None else value_log_decay
    length = q.shape[1]
    padding = -length % _backend(name).CHUNK
    if padding:  # tokens that write nothing, and whose output is cut off

        def pad(x: Any) -> Any:
            return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))

        q, k, v = pad(q), pad(k), pad(v)
        log_decay = None if log_decay is None else pad(log_decay)
        run = None if run is None else jnp.pad(run, [(0, 0), (0, padding)], mode="edge")
    static = name, scale, exact, interpret
    output, final = _in_pieces(static, q, k, v, log_decay, run, initial, bonus)
    return output[:, :length], final


def _in_pieces(static, q, k, v, log_decay, run, initial, bonus):
    """`_run` of pieces of key channels, whose outputs are added, and of value channels, which do not see each other."""
    name, _, exact, _ = static
    widths = _widths(name, q, v)
    if widths == (q.shape[3], v.shape[3]):
        return _run(static, q, k, v, log_decay, run, initial, bonus)
    by_value = name == "hopper_values"

    def call(keys, values):
        own = [x[..., keys] for x in (q, k)] + [v[..., values]]
        decay = log_decay[..., values if by_value else keys]
        more = None if bonus is None else bonus[:, keys]
        return _run(static, *own, decay, run, initial[..., keys, values], more)

    keys, values = (
        [slice(n, n + width) for n in range(0, size, width)]
        for size, width in zip((q.shape[3], v.shape[3]), widths, strict=True)
    )
    found = [[call(a, b) for b in values] for a in keys]
    outputs, memories = zip(
        *([jnp.concatenate(x, axis=-1) for x in zip(*row, strict=True)] for row in found),
        strict=True,
    )
    output = functools.reduce(jnp.add, (x.astype(jnp.float32) for x in outputs))
    return output if exact else output.astype(v.dtype), jnp.concatenate(memories, axis=-2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(static, q, k, v, log_decay, run, initial, bonus):
    inputs = q, k, v, log_decay, run, initial
    return _call(static, *inputs, bonus, save=False)[:2]


def _call(static, *inputs, **options):
    """A backend's forward."""
    name, scale, exact, interpret = static
    *arrays, bonus = inputs
    if exact and name == "hopper_values":
        options["exact"] = True
    found = _backend(name).forward(
        *arrays, scale=scale, interpret=interpret, **_extra(bonus), **options
    )
    output, *rest = found
    return output.astype(jnp.float32) if exact else output, *rest


def _extra(bonus) -> dict[str, Any]:  # only one backend knows it
    return {} if bonus is None else dict(bonus=bonus)


def _forward(static, *primals):
    wanted = primals[3] is not None and primals[3].perturbed
    inputs = tuple(None if p is None else p.value for p in primals)
    output, final, residuals = keep(_call(static, *inputs))
    # A decay that is a constant of its head needs no gradient, and the backward is cheaper without. (An array: residuals
    # carry no flags.)
    return (output, final), (inputs, residuals, jnp.zeros((int(wanted), 0)))


def _backward(static, saved, cotangents):
    name, scale, _, interpret = static
    (inputs, residuals, wanted) = saved
    zeros: Any = jnp.zeros
    cotangents = (zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x for x in cotangents)
    *arrays, bonus = inputs
    d_output, d_final = cotangents
    log_decay = inputs[3]
    dq, dk, dv, d_decay, d_initial, *d_bonus = _backend(name).backward(
        *arrays, residuals, d_output.astype(inputs[0].dtype), d_final, scale=scale, interpret=interpret,
        decay_gradient=wanted.shape[0] == 1, **_extra(bonus),
    )  # fmt: skip
    if log_decay is not None and d_decay is None:
        d_decay = jnp.zeros_like(log_decay)
    return dq, dk, dv, d_decay, None, d_initial, *(d_bonus or [None])


_run.defvjp(_forward, _backward, symbolic_zeros=True)
