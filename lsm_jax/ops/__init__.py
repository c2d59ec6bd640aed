"""Memory updates as pure functions: arrays in, arrays out, no parameters and no configuration.

Every op takes sequence-first arrays and returns `(output, final_state)`; `lsm_jax.ops.segments` states what segment ids,
masks and states mean for all of them.
"""

from lsm_jax.ops.attention import AttentionState, attention, attention_state
from lsm_jax.ops.chosen import choices
from lsm_jax.ops.delta_memory import delta_memory
from lsm_jax.ops.linear_memory import linear_memory
from lsm_jax.ops.shift import ShiftState, shift_state, short_convolution, token_shift
from lsm_jax.ops.states import DeltaState, LinearState, delta_state, linear_state

__all__ = [
    "AttentionState",
    "DeltaState",
    "LinearState",
    "ShiftState",
    "attention",
    "attention_state",
    "choices",
    "delta_memory",
    "delta_state",
    "linear_memory",
    "linear_state",
    "shift_state",
    "short_convolution",
    "token_shift",
]
