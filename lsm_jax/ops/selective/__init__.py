"""`selective_memory`: memories in which every entry decays and is written independently of the others."""
