"""`online_memory`: a memory that is a small model, trained on each token by a gradient step."""
