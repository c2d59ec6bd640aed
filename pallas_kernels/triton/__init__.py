"""Launch of Triton kernels from JAX, on an NVIDIA card by jax-triton and on a CPU by Triton's interpreter; needs the extra [triton]."""
