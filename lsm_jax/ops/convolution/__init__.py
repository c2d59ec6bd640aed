"""`short_convolution` and `token_shift`: a token combined with the few tokens before it."""
