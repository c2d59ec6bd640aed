"""The campaign of faults: training runs that are killed, and inputs that are damaged."""
