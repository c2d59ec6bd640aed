"""Commands for maintaining the repository."""
