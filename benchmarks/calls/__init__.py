"""Calls of ops that tests of Hopper's kernels and checks of Triton's make alike: their inputs, and the comparison with XLA in float32."""
