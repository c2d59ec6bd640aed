"""The mathematics of one chunk of linear attention and the delta rule, as functions of two-dimensional tiles that any backend can run."""
