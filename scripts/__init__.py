"""Commands that keep the repository."""
