"""Compare this checkout with a released commit; see `__main__`."""
