"""Feedforwards: the layers between mixers that treat each token alone. Same call as a mixer's; a layer may have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

from lsm_jax.feedforward.swiglu import SwiGLU, SwiGLUConfig

FEEDFORWARDS: dict[type, Callable[..., Any]] = {SwiGLUConfig: SwiGLU}


def check(config: Any, hidden_size: int) -> None:
    """Raise ValueError unless `config` is a feedforward's, and valid at this width."""
    if type(config) not in FEEDFORWARDS:
        known = ", ".join(c.__name__ for c in FEEDFORWARDS)
        raise ValueError(
            f"feedforward={config!r} is no feedforward's config; accepted are None and {known}"
        )
    config.validate(hidden_size)


def build(config: Any, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02) -> Any:
    """The feedforward a config describes, at this width."""
    check(config, hidden_size)
    return FEEDFORWARDS[type(config)](config, hidden_size, rngs=rngs, init_std=init_std)


__all__ = ["FEEDFORWARDS", "SwiGLU", "SwiGLUConfig", "build", "check"]
