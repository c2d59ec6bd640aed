"""The mathematics of a chunk on two-dimensional tiles, for any backend."""
