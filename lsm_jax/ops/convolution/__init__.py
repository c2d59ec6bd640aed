"""`short_convolution` and `token_shift`."""
