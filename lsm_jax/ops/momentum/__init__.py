"""`momentum_memory`: the delta rule by gradient steps with momentum."""
