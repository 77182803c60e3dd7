"""How workers find out that they differ: in weights, in plain tensors, and in the functions that they call."""
