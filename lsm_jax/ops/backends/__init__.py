"""How an op finds what runs it."""
