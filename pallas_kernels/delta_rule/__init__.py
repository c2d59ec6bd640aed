"""Fused kernels for the delta rule without decay or with a scalar one."""

from pallas_kernels.delta_rule.api import delta_rule, reasons

__all__ = ["delta_rule", "reasons"]
