"""`linear_memory`: memories under a decay that factorises."""
