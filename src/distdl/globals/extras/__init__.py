"""torch.func, vmap, control flow and flex_attention of global tensors. All but ``late`` is imported at a first call."""
