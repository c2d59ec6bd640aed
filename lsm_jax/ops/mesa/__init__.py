"""`mesa_memory`: the ridge regression of values on keys, solved for each query by conjugate gradients."""
