"""``flex_attention`` of global tensors. It is imported when a program imports torch's module of that name."""

# first, as torch's module imports this package at its own end, which must not be half imported then
import torch.nn.attention.flex_attention  # noqa: F401

from distdl.globals.extras.flex import lending

lending.install()
