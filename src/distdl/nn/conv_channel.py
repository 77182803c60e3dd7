"""The published module of the channel convolutions."""

from distdl.nn.conv import DistributedChannelConv1d, DistributedChannelConv2d, DistributedChannelConv3d

__all__ = ["DistributedChannelConv1d", "DistributedChannelConv2d", "DistributedChannelConv3d"]
