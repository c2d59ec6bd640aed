"""Mixers: one file per method, each with a config, a module around one op, and `METHOD`, its row in the table
`METHODS`.

To add a method, write its file and list it in `_TABLE`; a file outside of this package calls `register`.
Models, training, decoding and the test suite require no further change.
"""

from __future__ import annotations

from lsm_jax.mixers import (
    abc_attention,
    based,
    comba,
    deltanet,
    fox,
    gated_attention,
    gated_deltanet,
    gated_deltanet2,
    gated_deltaproduct,
    gated_retention,
    gateloop,
    gfw,
    gla,
    gsa,
    hgrn,
    hgrn2,
    kda,
    liger,
    lightnet,
    lightning,
    linear_attention,
    log_linear_gated_deltanet,
    log_linear_mamba2,
    lolcats,
    mamba,
    mamba2,
    mamba3,
    mamba3_mimo,
    mesa_net,
    mla,
    mlstm,
    moba,
    mom,
    momentum_deltanet,
    nsa,
    parallel,
    path,
    precond_gated_deltanet,
    precond_kda,
    rebased,
    retnet,
    rg_lru,
    rwkv6,
    rwkv7,
    s4d,
    short_conv,
    slstm,
    softmax,
    titans,
    ttt_linear,
    ttt_mlp,
)
from lsm_jax.mixers.abc_attention import ABC, ABCConfig
from lsm_jax.mixers.base import Context, Mixer, MixerOutput, MixerState
from lsm_jax.mixers.based import Based, BasedConfig
from lsm_jax.mixers.clock import Clock, advance, fresh_clock
from lsm_jax.mixers.comba import Comba, CombaConfig
from lsm_jax.mixers.delta_config import DeltaRuleConfig, GroupedDeltaRuleConfig
from lsm_jax.mixers.deltanet import DeltaNet, DeltaNetConfig
from lsm_jax.mixers.fox import FoX, FoXConfig
from lsm_jax.mixers.fp8 import use_fp8
from lsm_jax.mixers.gated_attention import GatedAttention, GatedAttentionConfig
from lsm_jax.mixers.gated_deltanet import GatedDeltaNet, GatedDeltaNetConfig
from lsm_jax.mixers.gated_deltanet2 import GatedDeltaNet2, GatedDeltaNet2Config
from lsm_jax.mixers.gated_deltaproduct import GatedDeltaProduct, GatedDeltaProductConfig
from lsm_jax.mixers.gated_retention import GatedRetention, GatedRetentionConfig
from lsm_jax.mixers.gateloop import GateLoop, GateLoopConfig
from lsm_jax.mixers.gfw import GFW, GFWConfig
from lsm_jax.mixers.gla import GLA, GLAConfig
from lsm_jax.mixers.gsa import GSA, GSAConfig
from lsm_jax.mixers.hgrn import HGRN, HGRNConfig
from lsm_jax.mixers.hgrn2 import HGRN2, HGRN2Config
from lsm_jax.mixers.kda import KDA, KDAConfig
from lsm_jax.mixers.layers import RopeScaling
from lsm_jax.mixers.liger import Liger, LigerConfig
from lsm_jax.mixers.lightnet import LightNet, LightNetConfig
from lsm_jax.mixers.lightning import Lightning, LightningConfig
from lsm_jax.mixers.linear_attention import LinearAttention, LinearAttentionConfig
from lsm_jax.mixers.log_linear_gated_deltanet import (
    LogLinearGatedDeltaNet,
    LogLinearGatedDeltaNetConfig,
)
from lsm_jax.mixers.log_linear_mamba2 import LogLinearMamba2, LogLinearMamba2Config
from lsm_jax.mixers.lolcats import Lolcats, LolcatsConfig
from lsm_jax.mixers.lora import LoRA, LoRAConfig, adaptable, add_adapters, merge_adapters
from lsm_jax.mixers.mamba import Mamba, MambaConfig
from lsm_jax.mixers.mamba2 import Mamba2, Mamba2Config
from lsm_jax.mixers.mamba3 import Mamba3, Mamba3Config
from lsm_jax.mixers.mamba3_mimo import Mamba3MIMOConfig
from lsm_jax.mixers.mesa_net import MesaNet, MesaNetConfig
from lsm_jax.mixers.method import (
    METHODS,
    WRAPPERS,
    Method,
    build,
    get_method,
    method_of,
    register,
)
from lsm_jax.mixers.mla import MLA, MLAConfig
from lsm_jax.mixers.mlstm import MLSTM, MLSTMConfig
from lsm_jax.mixers.moba import MoBA, MoBAConfig
from lsm_jax.mixers.mom import MoM, MoMConfig
from lsm_jax.mixers.momentum_deltanet import MomentumDeltaNet, MomentumDeltaNetConfig
from lsm_jax.mixers.nsa import NSA, NSAConfig
from lsm_jax.mixers.op_config import OpConfig, RecurrentConfig
from lsm_jax.mixers.parallel import Parallel, ParallelConfig
from lsm_jax.mixers.path import PaTH, PaTHConfig
from lsm_jax.mixers.precond_gated_deltanet import PrecondGatedDeltaNet, PrecondGatedDeltaNetConfig
from lsm_jax.mixers.precond_kda import PrecondKDA, PrecondKDAConfig
from lsm_jax.mixers.rebased import Rebased, RebasedConfig
from lsm_jax.mixers.retnet import RetNet, RetNetConfig
from lsm_jax.mixers.rg_lru import RGLRU, RGLRUConfig
from lsm_jax.mixers.rwkv6 import RWKV6, RWKV6Config
from lsm_jax.mixers.rwkv7 import RWKV7, RWKV7Config
from lsm_jax.mixers.s4d import S4D, S4DConfig
from lsm_jax.mixers.short_conv import ShortConv, ShortConvConfig
from lsm_jax.mixers.slstm import SLSTM, SLSTMConfig
from lsm_jax.mixers.softmax import Softmax, SoftmaxConfig
from lsm_jax.mixers.titans import Titans, TitansConfig
from lsm_jax.mixers.ttt_linear import TTTLinear, TTTLinearConfig
from lsm_jax.mixers.ttt_mlp import TTTMLP, TTTMLPConfig

_TABLE = (
    linear_attention,
    retnet,
    lightning,
    gated_retention,
    gla,
    hgrn,
    lightnet,
    hgrn2,
    rebased,
    based,
    gfw,
    rwkv6,
    mlstm,
    slstm,
    mamba,
    rg_lru,
    s4d,
    gateloop,
    mamba2,
    mamba3,
    mamba3_mimo,
    deltanet,
    gated_deltanet,
    kda,
    gated_deltaproduct,
    gated_deltanet2,
    comba,
    precond_gated_deltanet,
    precond_kda,
    momentum_deltanet,
    log_linear_mamba2,
    log_linear_gated_deltanet,
    mesa_net,
    rwkv7,
    ttt_linear,
    ttt_mlp,
    titans,
    gsa,
    abc_attention,
    softmax,
    path,
    gated_attention,
    mla,
    fox,
    moba,
    nsa,
    liger,
    lolcats,
)  # the order of the README's table

for _file in _TABLE:
    register(_file.METHOD)
register(mom.METHOD, wrapper=True)
register(parallel.METHOD, wrapper=True)
register(short_conv.METHOD, wrapper=True)

__all__ = [
    "NSA",
    "NSAConfig",
    "MoBA",
    "MoBAConfig",
    "SLSTM",
    "SLSTMConfig",
    "MomentumDeltaNet",
    "MomentumDeltaNetConfig",
    "PaTH",
    "PaTHConfig",
    "MesaNet",
    "MesaNetConfig",
    "ABC",
    "ABCConfig",
    "Based",
    "BasedConfig",
    "Clock",
    "Comba",
    "CombaConfig",
    "Context",
    "DeltaNet",
    "DeltaNetConfig",
    "DeltaRuleConfig",
    "FoX",
    "FoXConfig",
    "GFW",
    "GFWConfig",
    "GLA",
    "GLAConfig",
    "GSA",
    "GSAConfig",
    "GateLoop",
    "GateLoopConfig",
    "GatedAttention",
    "GatedAttentionConfig",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "GatedDeltaNet2",
    "GatedDeltaNet2Config",
    "GatedDeltaProduct",
    "GatedDeltaProductConfig",
    "GatedRetention",
    "GatedRetentionConfig",
    "GroupedDeltaRuleConfig",
    "HGRN",
    "HGRN2",
    "HGRN2Config",
    "HGRNConfig",
    "KDA",
    "KDAConfig",
    "Liger",
    "LigerConfig",
    "LightNet",
    "LightNetConfig",
    "Lightning",
    "LightningConfig",
    "LinearAttention",
    "LinearAttentionConfig",
    "LoRA",
    "LoRAConfig",
    "LogLinearGatedDeltaNet",
    "LogLinearGatedDeltaNetConfig",
    "LogLinearMamba2",
    "LogLinearMamba2Config",
    "Lolcats",
    "LolcatsConfig",
    "METHODS",
    "MLA",
    "MLAConfig",
    "MLSTM",
    "MLSTMConfig",
    "Mamba",
    "Mamba2",
    "Mamba2Config",
    "Mamba3",
    "Mamba3Config",
    "Mamba3MIMOConfig",
    "MambaConfig",
    "Method",
    "Mixer",
    "OpConfig",
    "Parallel",
    "ParallelConfig",
    "PrecondGatedDeltaNet",
    "PrecondGatedDeltaNetConfig",
    "PrecondKDA",
    "PrecondKDAConfig",
    "RGLRU",
    "RGLRUConfig",
    "RecurrentConfig",
    "MixerOutput",
    "MixerState",
    "MoM",
    "MoMConfig",
    "RWKV6",
    "RWKV6Config",
    "RWKV7",
    "RWKV7Config",
    "Rebased",
    "RebasedConfig",
    "RetNet",
    "RetNetConfig",
    "RopeScaling",
    "S4D",
    "S4DConfig",
    "ShortConv",
    "ShortConvConfig",
    "Softmax",
    "SoftmaxConfig",
    "TTTLinear",
    "TTTLinearConfig",
    "TTTMLP",
    "TTTMLPConfig",
    "Titans",
    "TitansConfig",
    "WRAPPERS",
    "adaptable",
    "add_adapters",
    "advance",
    "build",
    "fresh_clock",
    "get_method",
    "merge_adapters",
    "method_of",
    "register",
    "use_fp8",
]
