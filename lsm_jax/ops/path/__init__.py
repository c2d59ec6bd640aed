"""`path_attention`: softmax attention whose positions are products of Householder-like matrices of the tokens between."""
