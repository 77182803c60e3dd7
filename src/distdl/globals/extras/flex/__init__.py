"""``flex_attention`` of global tensors. It is imported behind torch's module, when a program imports that."""

# First: behind it, its functions are replaced by those of this package, which would be half done otherwise.
import torch.nn.attention.flex_attention  # noqa: F401
