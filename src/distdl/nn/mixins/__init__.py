"""The published mixins: the geometry of halos, for a user's own layers."""

from distdl.nn.mixins.conv_mixin import ConvMixin
from distdl.nn.mixins.halo_mixin import HaloMixin
from distdl.nn.mixins.pooling_mixin import PoolingMixin

__all__ = ["ConvMixin", "HaloMixin", "PoolingMixin"]
