"""`online_memory`: memories that learn by gradients of an inner loss."""
