"""A fused kernel for the gradient of SwiGLU, with the hidden layer again."""

from pallas_kernels.swiglu.api import swiglu_gradients, unsupported

__all__ = ["swiglu_gradients", "unsupported"]
