"""`selective_memory`: memories whose entries stand alone."""
