"""`token_mixes`, `rwkv7_gates` and `rwkv7_output`: what RWKV7 computes between its projections and its memory."""
