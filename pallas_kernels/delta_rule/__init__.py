"""Fused kernels for the delta rule: without decay (DeltaNet), with a scalar decay (Gated DeltaNet), or with a decay per key channel (KDA)."""

from pallas_kernels.delta_rule.api import delta_rule, unsupported

__all__ = ["delta_rule", "unsupported"]
