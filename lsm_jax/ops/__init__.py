"""Memory updates as pure functions: arrays in, arrays out, no parameters and no configuration.

Every op takes sequence-first arrays and returns `(output, final_state)`; `lsm_jax.ops.core.segments` states
what segment ids, masks and states mean for all of them.

Inputs are finite, except at tokens that do not write: values there are never used. Elsewhere a value that is
not finite (and in `delta_memory`, `dplr_memory` and `online_memory` a product that overflows) makes outputs
of its chunk NaN, those of earlier tokens too, since 0 times infinity is NaN. Scores of queries with later
keys are masked before they are used.
"""

from lsm_jax.ops.attention.attention import attention
from lsm_jax.ops.attention.state import AttentionState, attention_state
from lsm_jax.ops.attention.store import store_tokens
from lsm_jax.ops.backends.select import choices
from lsm_jax.ops.blocks.block_attention import block_attention, native_sparse_attention
from lsm_jax.ops.convolution.short_convolution import (
    ShiftState,
    shift_state,
    short_convolution,
    token_shift,
)
from lsm_jax.ops.core.document_count import DocumentCount, number_documents
from lsm_jax.ops.core.saved import CONVOLVED, INPUTS
from lsm_jax.ops.core.states import DeltaState, LinearState, delta_state, linear_state
from lsm_jax.ops.delta.delta_memory import delta_memory
from lsm_jax.ops.delta.dplr_memory import dplr_memory
from lsm_jax.ops.linear.linear_memory import linear_memory
from lsm_jax.ops.linear.phase import cumulative_phase
from lsm_jax.ops.linear.running_logsumexp import (
    LogSumExpState,
    logsumexp_state,
    running_logsumexp,
)
from lsm_jax.ops.log_linear.log_linear_memory import log_linear_memory
from lsm_jax.ops.log_linear.state import LogLinearState, log_linear_state
from lsm_jax.ops.mesa.mesa_memory import mesa_memory
from lsm_jax.ops.mesa.state import MesaState, mesa_state
from lsm_jax.ops.momentum.momentum_memory import momentum_memory
from lsm_jax.ops.momentum.state import MomentumState, momentum_state
from lsm_jax.ops.normalization.gated_rms_norm import gated_rms_norm
from lsm_jax.ops.online.inner_models import Inner
from lsm_jax.ops.online.online_memory import online_memory
from lsm_jax.ops.online.state import OnlineState, online_state
from lsm_jax.ops.path.path_attention import path_attention
from lsm_jax.ops.path.state import path_attention_state
from lsm_jax.ops.rwkv7.rwkv7_gates import rwkv7_gates
from lsm_jax.ops.rwkv7.rwkv7_output import rwkv7_output
from lsm_jax.ops.rwkv7.token_mixes import token_mixes
from lsm_jax.ops.selective.selective_memory import selective_memory
from lsm_jax.ops.selective.state import SelectiveState, selective_state
from lsm_jax.ops.selective.time_invariant import time_invariant_memory
from lsm_jax.ops.slots.slot_memory import slot_memory
from lsm_jax.ops.slots.state import SlotState, slot_state
from lsm_jax.ops.slstm.slstm_memory import slstm_memory
from lsm_jax.ops.slstm.state import SLSTMState, slstm_state
from pallas_kernels.residuals import KEPT

__all__ = [
    "CONVOLVED",
    "INPUTS",
    "KEPT",
    "AttentionState",
    "DeltaState",
    "DocumentCount",
    "Inner",
    "LinearState",
    "LogLinearState",
    "LogSumExpState",
    "MesaState",
    "MomentumState",
    "OnlineState",
    "SLSTMState",
    "SelectiveState",
    "ShiftState",
    "SlotState",
    "attention",
    "attention_state",
    "block_attention",
    "choices",
    "cumulative_phase",
    "delta_memory",
    "delta_state",
    "dplr_memory",
    "gated_rms_norm",
    "linear_memory",
    "linear_state",
    "log_linear_memory",
    "log_linear_state",
    "logsumexp_state",
    "mesa_memory",
    "mesa_state",
    "momentum_memory",
    "momentum_state",
    "native_sparse_attention",
    "number_documents",
    "online_memory",
    "online_state",
    "path_attention",
    "path_attention_state",
    "running_logsumexp",
    "rwkv7_gates",
    "rwkv7_output",
    "selective_memory",
    "selective_state",
    "shift_state",
    "short_convolution",
    "slot_memory",
    "slot_state",
    "slstm_memory",
    "slstm_state",
    "store_tokens",
    "time_invariant_memory",
    "token_mixes",
    "token_shift",
]
