"""The published module of the general convolutions."""

from distdl.nn.conv import DistributedGeneralConv1d, DistributedGeneralConv2d, DistributedGeneralConv3d

__all__ = ["DistributedGeneralConv1d", "DistributedGeneralConv2d", "DistributedGeneralConv3d"]
