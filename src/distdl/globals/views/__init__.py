"""Which tensors share memory, and what was written."""
