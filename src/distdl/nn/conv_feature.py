"""The published module of the feature convolutions."""

from distdl.nn.conv import DistributedFeatureConv1d, DistributedFeatureConv2d, DistributedFeatureConv3d

__all__ = ["DistributedFeatureConv1d", "DistributedFeatureConv2d", "DistributedFeatureConv3d"]
