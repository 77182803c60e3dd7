"""Which global tensors would share memory in torch, their strides there, and what functions write in place."""
