"""torch.func, vmap, control flow and flex_attention of global tensors, imported when one is first called."""
