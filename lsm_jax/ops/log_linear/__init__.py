"""`log_linear_memory`: a memory for each power of two of tokens into the past."""
