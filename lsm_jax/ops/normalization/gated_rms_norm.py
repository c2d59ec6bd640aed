"""The gated norm at the end of a mixer: root-mean-square norm, learned scale and gate, with a skip in front."""

from __future__ import annotations

import math

import jax
from jaxtyping import Array, Float

from lsm_jax.ops.backends.registry import check_implementation
from lsm_jax.ops.backends.run import run_inline, static_of
from lsm_jax.ops.core import checks
from lsm_jax.ops.normalization import backends  # noqa: F401  (registers the backends)
from lsm_jax.ops.normalization.xla import ACTIVATIONS, NormOptions
from lsm_jax.parallel import TOKENS, alone, mesh_axes, over_mesh

_OP = "gated_rms_norm"


def gated_rms_norm(
    x: Float[Array, "B T H V"],
    gate: Float[Array, "B T H V"],
    scale: Float[Array, ...],
    *,
    skip: Float[Array, " H"] | None = None,
    skip_input: Float[Array, "B T H V"] | None = None,
    eps: float,
    group: int = 1,
    activation: str = "silu",
    gate_first: bool = False,
    implementation: str | tuple[str, ...] | None = None,
) -> Float[Array, "B T H V"]:
    """Normalise a mixer's output and multiply it by its gate, in float32: `scale ⊙ norm(y) ⊙ activation(gate)` or, with
    `gate_first`, `scale ⊙ norm(y ⊙ activation(gate))`, where `y = x + skip skip_input` and `norm(y) = y / sqrt(mean(y²) + eps)`
    over the channels of a group of heads.

    The first is the output of RetNet (arXiv 2307.08621, Eq. 8) and GLA (arXiv 2312.06635, section 4.4), the second that of Mamba2
    (arXiv 2405.21060, section 7).

    Args:
        x: [B, T, H, V], the output of the mixer's memory.
        gate: [B, T, H, V], before its activation.
        scale: [V], the same for all heads, or [H, V].
        skip: [H], the weights of `skip_input`; None adds nothing.
        skip_input: [B, T, H, V], given if and only if `skip` is.
        eps: added to the mean square.
        group: consecutive heads that are normalised together; a divisor of H. If a mesh shards heads so that a group is on several
            devices, XLA sums over them.
        activation: of the gate: "silu" or "sigmoid".
        gate_first: whether the gate multiplies before the norm.
        implementation: None (the first automatic backend that supports the call; see docs/kernels.md), a
            backend's name ("xla" or "mosaic_gpu"), or a tuple of names in order of preference.

    Returns:
        [B, T, H, V] in x's dtype. With `gate_first` or a skip it has reverse-mode derivatives only.

    Raises:
        NotImplementedError: no backend of the given names supports the call; the message names the
            requirement.
        ValueError: a shape, `group`, `activation` or `implementation` is not accepted.
    """
    check_implementation(_OP, implementation)
    if x.ndim != 4:
        raise ValueError(f"{_OP}: x has shape {x.shape}; accepted is [B, T, H, V]")
    heads, channels = x.shape[2:]
    checks.check_shape(_OP, "gate", gate, x.shape, "B, T, H, V")
    if scale.shape not in ((channels,), (heads, channels)):
        raise ValueError(
            f"{_OP}: scale has shape {scale.shape}; accepted are [V] = {(channels,)} and [H, V] = {(heads, channels)}"
        )
    if (skip is None) != (skip_input is None):
        raise ValueError(
            f"{_OP}: only one of skip and skip_input is given; accepted are both or none"
        )
    if skip is not None and skip_input is not None:
        checks.check_shape(_OP, "skip", skip, (heads,), "H")
        checks.check_shape(_OP, "skip_input", skip_input, x.shape, "B, T, H, V")
    if group < 1 or heads % group:
        raise ValueError(f"{_OP}: group={group!r}; accepted are divisors of the {heads} heads")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{_OP}: activation={activation!r}; accepted are {tuple(ACTIVATIONS)}")
    # If a group would be on several devices, the partitioner divides the heads.
    meshes = jax.sharding.get_abstract_mesh(), jax.typeof(x).sharding.mesh
    shards = [math.prod(dict(m.shape).get(n, 1) for n in mesh_axes("heads")) for m in meshes]
    complete = not any(heads // group % n for n in shards)
    by_head = "heads" if complete else None
    tokens = (*TOKENS[:2], by_head)
    per_head = (by_head, None) if scale.ndim == 2 else (None,)
    return over_mesh(
        run_inline,
        dict(x=x, gate=gate, skip_input=skip_input),
        dict(scale=scale, skip=skip),
        static_of(_OP, NormOptions(eps, group, activation, gate_first), implementation),
        axes=dict(x=tokens, gate=tokens, skip_input=tokens, scale=per_head, skip=(by_head,)),
        out_axes=tokens,
        in_sequence=alone,
    )
