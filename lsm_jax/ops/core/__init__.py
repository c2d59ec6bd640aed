"""The algebra of memory updates: segments, states, decays, and devices that share a row."""
