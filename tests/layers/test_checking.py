"""The check of a network for torch modules that take blocks for whole tensors."""

import inspect

import pytest
import torch
from helpers_layers import every_worker_raises, on_workers
from torch import nn

import distdl
from distdl.nn import (
    DistributedBatchNorm,
    DistributedConv3d,
    DistributedConvTranspose3d,
    DistributedLinear,
    DistributedMaxPool3d,
    Repartition,
    checking,
)
from distdl.nn.placement import uniform_parameter
from distdl.partition.layout import Layout

HALVES = {"kernel_size": 2, "stride": 2}


class Block(nn.Module):
    """Two convolutions, as a user writes them: a container with a forward."""

    def __init__(self, P, before, after, activation):
        super().__init__()
        self.first = DistributedConv3d(P, in_channels=before, out_channels=after, kernel_size=3, padding=1)
        self.norm = DistributedBatchNorm(P, after)
        self.activation = activation()
        self.second = DistributedConv3d(P, in_channels=after, out_channels=after, kernel_size=3, padding=1)

    def forward(self, x):
        return self.activation(self.second(self.activation(self.norm(self.first(x)))))


class UNet(nn.Module):
    """One level of a 3-d U-Net."""

    def __init__(self, P, activation, pool, head):
        super().__init__()
        self.encoder = Block(P, 1, 2, activation)
        self.pool = pool
        self.bottom = nn.ModuleList([Block(P, 2, 4, activation)])
        self.up = DistributedConvTranspose3d(P, in_channels=4, out_channels=2, **HALVES)
        self.decoder = Block(P, 4, 2, activation)
        self.head = nn.Sequential(nn.Dropout(0.1), head)

    def forward(self, x):
        skip = self.encoder(x)
        y = self.bottom[0](self.pool(skip))
        return self.head(self.decoder(torch.cat([skip, self.up(y)], 1)))


def test_a_network_with_modules_of_torch_between_the_layers():
    def main(P):
        grid = P.reshape(1, 1, 2, 2, 1)
        distdl.check(UNet(grid, nn.PReLU, nn.MaxPool3d(2), nn.Conv3d(2, 3, 1)))

    text = every_worker_raises(4, main)
    lines = text.splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:-1]] == [
        "encoder.activation", "pool", "bottom.0.activation", "decoder.activation", "head.1",
    ]  # fmt: skip
    assert "PReLU has parameters (weight), of which every worker would train a copy by itself; put a module" in lines[1]
    assert "MaxPool3d mixes the cells along dim 2, which P 1x1x2x2x1" in lines[2]
    assert lines[2].endswith("put distdl.nn.DistributedMaxPool3d there")
    assert "Conv3d has parameters (weight, bias)" in lines[5]
    assert lines[5].endswith("put distdl.nn.DistributedConv3d there") and "allowed" in lines[6]


def test_the_same_network_with_our_layers():
    def main(P):
        grid = P.reshape(1, 1, 2, 2, 1)
        head = DistributedConv3d(grid, in_channels=2, out_channels=3, kernel_size=1)
        network = UNet(grid, nn.LeakyReLU, DistributedMaxPool3d(grid, 2, 2), head)
        distdl.check(network)
        assert network(torch.ones(1, 1, 4, 4, 4)).shape == (1, 3, 4, 4, 4)
        allowed = UNet(grid, nn.PReLU, DistributedMaxPool3d(grid, 2, 2), nn.Conv3d(2, 3, 1))
        distdl.check(allowed, allowed=["encoder.activation", "bottom", "decoder.activation", "head.1"])

    on_workers(4, main)


ON = {  # a module of torch, P_x of a layer beside it, and which dim is refused (None: it is right there)
    "softmax of split classes": (nn.Softmax(1), (1, 2, 1), 1),
    "softmax of whole classes": (nn.Softmax(1), (2, 1, 2), None),
    "softmax of the last dim": (nn.LogSoftmax(-1), (1, 1, 2), 2),
    "softmax that guesses": (nn.Softmax(None), (2, 1), 0),
    "pooling of the batch": (nn.MaxPool2d(2), (2, 2, 1, 1), None),
    "pooling of space": (nn.AvgPool2d(2), (2, 1, 1, 2), 3),
    "pooling beside a matrix": (nn.AdaptiveAvgPool1d(1), (2, 2), None),
    "padding": (nn.ReflectionPad1d(1), (1, 1, 2), 2),
    "padding of whole dims": (nn.ZeroPad2d(1), (2, 2, 1, 1), None),
    "flattened channels and space": (nn.Flatten(), (2, 2, 1, 1), None),
    "flattened space": (nn.Flatten(), (1, 2, 2, 1), 2),
    "unflattened channels": (nn.Unflatten(1, (2, 2)), (1, 2), 1),
    "moments of a batch": (nn.BatchNorm1d(4, affine=False), (2, 2), 0),
    "moments of channels": (nn.BatchNorm1d(4, affine=False), (1, 2, 1), None),
    "moments of samples": (nn.InstanceNorm1d(4), (2, 2, 1), None),
    "moments of features": (nn.LayerNorm(4, elementwise_affine=False), (2, 2), 1),
    "moments of whole features": (nn.RMSNorm(4, elementwise_affine=False), (2, 1), None),
    "shuffled channels": (nn.PixelShuffle(2), (1, 2, 1, 1), 1),
    "shuffled pixels": (nn.PixelShuffle(2), (1, 1, 2, 2), None),
    "upsampling": (nn.UpsamplingNearest2d(scale_factor=2), (1, 1, 2, 1), 2),
    "a loss": (nn.MSELoss(), (2, 1), 0),
    "losses of elements": (nn.MSELoss(reduction="none"), (2, 2), None),
    "losses of places": (nn.CrossEntropyLoss(reduction="none"), (2, 2), 1),
    "dropout": (nn.Dropout(), (2, 2), None),
    "a gate": (nn.GLU(), (1, 2), 1),
}


@pytest.mark.parametrize("what", ON)
def test_what_mixes_cells_is_refused_where_its_dims_are_split(what):
    module, shape, dim = ON[what]
    workers = torch.tensor(shape).prod().item()

    def main(P):
        P_x = P.reshape(*shape)
        distdl.check(nn.Sequential(Repartition(P_x, P_x), module))

    if dim is None:
        on_workers(workers, main)
    else:
        text = every_worker_raises(workers, main)
        assert (
            f"  1: {type(module).__name__} mixes the cells along dim {dim}, which P {'x'.join(map(str, shape))}" in text
        )


class Scale(nn.Module):
    """A factor: a copy on each worker, or, with a layout, the blocks of one parameter."""

    def __init__(self, layout=None):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1)) if layout is None else uniform_parameter(layout, 1.0)
        if layout is not None:
            self.parameter_layouts = {"factor": layout}

    def forward(self, x):
        return self.factor * x


def test_modules_of_ones_own():
    def main(P):
        row = P.reshape(1, 2)
        inside = nn.Sequential(
            DistributedLinear(row, P[:1].reshape(1, 1), row, 4, 4), Scale(Layout.balanced(row, (1, 4)))
        )
        distdl.check(nn.Sequential(inside, nn.Identity()))
        distdl.check(inside[0])
        distdl.check(nn.Sequential(inside, Scale()), allowed=["1"])
        for network, path in ((nn.Sequential(inside, Scale()), "1"), (Scale(), "the network itself")):
            with pytest.raises(ValueError, match=rf"{path}: Scale has parameters \(factor\)"):
                distdl.check(network)
        with pytest.raises(ValueError, match="the network has no head, tail"):
            distdl.check(inside, allowed=["tail", "head", "0"])

    on_workers(2, main)


def test_torchs_modules_with_parts_are_named_once():
    attention = nn.Sequential(nn.MultiheadAttention(4, 2), nn.TransformerEncoderLayer(4, 2, 4))
    with pytest.raises(ValueError, match="every worker would train a copy") as error:
        distdl.check(attention)
    found = [line.split(":")[0].strip() for line in str(error.value).splitlines()[1:-1]]
    assert found == ["0", "1.self_attn", "1.linear1", "1.linear2", "1.norm1", "1.norm2"]


FINE = {  # of torch's modules without parameters, those that work cell by cell, and containers
    "AlphaDropout", "CELU", "Container", "DataParallel", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "ELU",
    "FeatureAlphaDropout", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU",
    "LogSigmoid", "Mish", "Module", "ModuleDict", "ModuleList", "RReLU", "ReLU", "ReLU6", "SELU", "Sequential", "SiLU",
    "Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink", "Threshold",
}  # fmt: skip
TRAINED = {  # those with parameters, or made of such
    "AdaptiveLogSoftmaxWithLoss", "Bilinear", "EmbeddingBag", "GRU", "GRUCell", "LSTM", "LSTMCell",
    "MultiheadAttention", "PReLU", "ParameterDict", "ParameterList", "RNN", "RNNBase", "RNNCell", "RNNCellBase",
    "Transformer", "TransformerDecoder", "TransformerDecoderLayer", "TransformerEncoder", "TransformerEncoderLayer",
}  # fmt: skip


def test_every_module_of_torch_is_in_one_of_the_lists():
    """One that torch adds has to be put into a list, too."""
    kinds = {name: kind for name, kind in vars(nn).items() if inspect.isclass(kind) and issubclass(kind, nn.Module)}
    mixing = {name for name, kind in kinds.items() if any(issubclass(kind, one) for one, _, _ in checking._MIXING)}
    assert mixing | FINE | TRAINED == kinds.keys() and not mixing & (FINE | TRAINED)


@pytest.mark.parametrize("module", [
    nn.Conv1d(1, 1, 1), nn.LazyConv2d(1, 1), nn.ConvTranspose3d(1, 1, 1), nn.Linear(1, 1), nn.LazyLinear(1),
    nn.Embedding(1, 1), nn.BatchNorm2d(1), nn.LazyBatchNorm1d(), nn.InstanceNorm3d(1, affine=True), nn.GroupNorm(1, 1),
    nn.LayerNorm(1), nn.RMSNorm(1), nn.MaxPool1d(2), nn.AvgPool2d(2), nn.LPPool3d(2, 2), nn.AdaptiveAvgPool1d(1),
    nn.AdaptiveMaxPool3d(1), nn.Upsample(2), nn.UpsamplingBilinear2d(2), nn.ZeroPad3d(1), nn.CircularPad1d(1),
    nn.ReplicationPad2d(1), nn.ConstantPad1d(1, 0.0), nn.L1Loss(), nn.MSELoss(), nn.SmoothL1Loss(), nn.HuberLoss(),
    nn.PoissonNLLLoss(), nn.BCELoss(), nn.BCEWithLogitsLoss(), nn.KLDivLoss(), nn.NLLLoss(), nn.CrossEntropyLoss(),
], ids=lambda module: type(module).__name__)  # fmt: skip
def test_what_it_says_to_put_there_exists(module):
    advice = checking._advice(module, False)
    assert hasattr(distdl.nn, advice.removeprefix("put distdl.nn.").removesuffix(" there"))
