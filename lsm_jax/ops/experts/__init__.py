"""Products of groups of rows, each group with its own matrix."""
