"""Other libraries (peers) whose kernels and models the benchmarks time in the same run as this library's."""
