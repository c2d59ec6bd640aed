"""Fused kernels for the delta rule: without decay, with a scalar decay, or with a decay per key channel (KDA)."""

from pallas_kernels.delta_rule.api import delta_rule, unsupported

__all__ = ["delta_rule", "unsupported"]
