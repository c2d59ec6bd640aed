"""Code that the kernels of several ops for TPU share: the halving of decays, the layout of arrays, and inverses of triangular systems."""
