"""`gated_rms_norm`: the root-mean-square norm and the gate at the end of a mixer."""
