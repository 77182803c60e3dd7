"""The distributed modules: data movement primitives, and the layers that are built on them."""

from distdl.environment.arguments import checks_arguments
from distdl.nn import init, loss, mixins, utils
from distdl.nn.all_gather import AllGather
from distdl.nn.all_sum_reduce import AllSumReduce
from distdl.nn.broadcast import Broadcast
from distdl.nn.conv import (
    DistributedChannelConv1d,
    DistributedChannelConv2d,
    DistributedChannelConv3d,
    DistributedConv1d,
    DistributedConv2d,
    DistributedConv3d,
    DistributedConvTranspose1d,
    DistributedConvTranspose2d,
    DistributedConvTranspose3d,
    DistributedFeatureConv1d,
    DistributedFeatureConv2d,
    DistributedFeatureConv3d,
    DistributedGeneralConv1d,
    DistributedGeneralConv2d,
    DistributedGeneralConv3d,
)
from distdl.nn.dropout import (
    DistributedDropout,
    DistributedDropout1d,
    DistributedDropout2d,
    DistributedDropout3d,
)
from distdl.nn.embedding import DistributedEmbedding
from distdl.nn.halo_exchange import HaloExchange
from distdl.nn.interpolate import Interpolate
from distdl.nn.linear import DistributedLinear
from distdl.nn.loss import (
    DistributedBCELoss,
    DistributedBCEWithLogitsLoss,
    DistributedCrossEntropyLoss,
    DistributedHuberLoss,
    DistributedKLDivLoss,
    DistributedL1Loss,
    DistributedLossBase,
    DistributedMSELoss,
    DistributedNLLLoss,
    DistributedPoissonNLLLoss,
    DistributedSmoothL1Loss,
    ZeroVolumeCorrectorFunction,
)
from distdl.nn.module import Module, Option
from distdl.nn.normalisation import (
    DistributedBatchNorm,
    DistributedGroupNorm,
    DistributedInstanceNorm,
    DistributedLayerNorm,
    DistributedRMSNorm,
)
from distdl.nn.padding import DistributedPad
from distdl.nn.pooling import (
    DistributedAdaptiveAvgPool1d,
    DistributedAdaptiveAvgPool2d,
    DistributedAdaptiveAvgPool3d,
    DistributedAdaptiveMaxPool1d,
    DistributedAdaptiveMaxPool2d,
    DistributedAdaptiveMaxPool3d,
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedAvgPool3d,
    DistributedLPPool1d,
    DistributedLPPool2d,
    DistributedLPPool3d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedMaxPool3d,
)
from distdl.nn.reduce_scatter import ReduceScatter
from distdl.nn.repartition import Repartition
from distdl.nn.sum_reduce import SumReduce
from distdl.nn.transpose import DistributedTranspose
from distdl.nn.upsampling import DistributedUpsample
from distdl.tensors import connection
from distdl.tensors.repeats import repeat_calls

__all__ = [
    "AllGather",
    "AllSumReduce",
    "Broadcast",
    "DistributedAdaptiveAvgPool1d",
    "DistributedAdaptiveAvgPool2d",
    "DistributedAdaptiveAvgPool3d",
    "DistributedAdaptiveMaxPool1d",
    "DistributedAdaptiveMaxPool2d",
    "DistributedAdaptiveMaxPool3d",
    "DistributedAvgPool1d",
    "DistributedAvgPool2d",
    "DistributedAvgPool3d",
    "DistributedBCELoss",
    "DistributedBCEWithLogitsLoss",
    "DistributedBatchNorm",
    "DistributedChannelConv1d",
    "DistributedChannelConv2d",
    "DistributedChannelConv3d",
    "DistributedConv1d",
    "DistributedConv2d",
    "DistributedConv3d",
    "DistributedConvTranspose1d",
    "DistributedConvTranspose2d",
    "DistributedConvTranspose3d",
    "DistributedCrossEntropyLoss",
    "DistributedDropout",
    "DistributedDropout1d",
    "DistributedDropout2d",
    "DistributedDropout3d",
    "DistributedEmbedding",
    "DistributedFeatureConv1d",
    "DistributedFeatureConv2d",
    "DistributedFeatureConv3d",
    "DistributedGeneralConv1d",
    "DistributedGeneralConv2d",
    "DistributedGeneralConv3d",
    "DistributedGroupNorm",
    "DistributedHuberLoss",
    "DistributedInstanceNorm",
    "DistributedKLDivLoss",
    "DistributedL1Loss",
    "DistributedLPPool1d",
    "DistributedLPPool2d",
    "DistributedLPPool3d",
    "DistributedLayerNorm",
    "DistributedLinear",
    "DistributedLossBase",
    "DistributedMSELoss",
    "DistributedMaxPool1d",
    "DistributedMaxPool2d",
    "DistributedMaxPool3d",
    "DistributedNLLLoss",
    "DistributedPad",
    "DistributedPoissonNLLLoss",
    "DistributedRMSNorm",
    "DistributedSmoothL1Loss",
    "DistributedTranspose",
    "DistributedUpsample",
    "HaloExchange",
    "Interpolate",
    "Module",
    "Option",
    "ReduceScatter",
    "Repartition",
    "SumReduce",
    "ZeroVolumeCorrectorFunction",
    "init",
    "local",
    "loss",
    "mixins",
    "repeat_calls",
    "utils",
]

local = checks_arguments(connection.local)  # for authors: the function itself, which distdl calls, checks no arguments
