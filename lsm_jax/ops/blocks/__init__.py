"""`block_attention`: softmax attention to the blocks of earlier tokens that a query selects."""
