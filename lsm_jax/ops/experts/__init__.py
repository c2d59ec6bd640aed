"""Products of groups of rows, each group with its own matrix, as in a mixture of experts."""
