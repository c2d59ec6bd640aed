"""Products of groups of rows with one matrix each."""
