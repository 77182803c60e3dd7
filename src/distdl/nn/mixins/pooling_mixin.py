"""Which inputs a pooling reads: the same as a convolution."""

from distdl.nn.mixins.conv_mixin import ConvMixin


class PoolingMixin(ConvMixin):
    """Windows of a pooling."""
