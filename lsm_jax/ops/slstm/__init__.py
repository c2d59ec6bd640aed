"""`slstm_memory`: xLSTM's scalar memory, whose output is an input of its next gates."""
