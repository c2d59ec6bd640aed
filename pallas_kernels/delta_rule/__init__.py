"""Fused kernels for the delta rule: without decay, with a scalar one or with one a key channel (KDA)."""

from pallas_kernels.delta_rule.api import delta_rule, reason, reasons

__all__ = ["delta_rule", "reason", "reasons"]
