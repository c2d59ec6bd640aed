"""`delta_memory` and `dplr_memory`: memories whose transition is a matrix instead of a decay."""
