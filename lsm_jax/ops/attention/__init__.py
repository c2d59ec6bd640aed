"""`attention`: the op of softmax attention, with or without forget gates."""
