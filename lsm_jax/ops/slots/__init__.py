"""`slot_memory`: a softmax over slots between two linear memories."""
