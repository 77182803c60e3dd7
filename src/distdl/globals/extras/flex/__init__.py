"""``flex_attention`` of global tensors. What a program imports of torch's module imports this behind it."""

# (first: it imports this package behind itself, which would be half done if this stood after the others)
import torch.nn.attention.flex_attention  # noqa: F401

from distdl.globals.extras.flex import lending

lending.install()
