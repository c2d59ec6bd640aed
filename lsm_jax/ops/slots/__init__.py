"""`slot_memory`: gated slot attention, a softmax over slots between two linear memories."""
