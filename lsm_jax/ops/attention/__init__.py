"""`attention`: softmax attention, with or without forget gates."""
