"""`swiglu_product`: SwiGLU's hidden layer, from gate and up side by side, and the product behind it."""
