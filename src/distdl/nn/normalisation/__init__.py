"""Normalisations of tensors that are split over workers: batch, instance, group, layer and RMS."""

from distdl.nn.normalisation.batch import DistributedBatchNorm
from distdl.nn.normalisation.group import DistributedGroupNorm
from distdl.nn.normalisation.instance import DistributedInstanceNorm
from distdl.nn.normalisation.layer import DistributedLayerNorm, DistributedRMSNorm

__all__ = [
    "DistributedBatchNorm",
    "DistributedGroupNorm",
    "DistributedInstanceNorm",
    "DistributedLayerNorm",
    "DistributedRMSNorm",
]
