"""The path of a layer in its model: errors, the ledger and a profile say it once the model has named its layers."""

import copy

import pytest
import torch
from helpers_layers import on_workers
from torch import nn
from torch.profiler import profile

import distdl
from distdl.nn import (
    AllSumReduce,
    DistributedAdaptiveAvgPool2d,
    DistributedAdaptiveMaxPool2d,
    DistributedConv2d,
    DistributedCrossEntropyLoss,
    DistributedEmbedding,
    DistributedMSELoss,
    DistributedPad,
    Repartition,
)
from distdl.transport import CommunicationError


class Encoder(nn.Module):
    """Two blocks, of which the second is a copy of the first."""

    def __init__(self, P):
        super().__init__()
        pad = DistributedPad(P, (1, 1))
        conv = DistributedConv2d(P, in_channels=2, out_channels=2, kernel_size=3, padding=1)
        block = nn.Sequential(pad, conv, Repartition(P, P))
        self.encoder = nn.ModuleList([block, copy.deepcopy(block)])

    def forward(self, x):
        for block in self.encoder:
            x = block(x)
        return x


def named_by(how, model):
    if how == "ledger":
        with distdl.ledger(model):
            pass
    else:
        getattr(distdl, how)(model)


def wrong(x):
    return x.double() if distdl.world().rank == 1 else x


@pytest.mark.parametrize("how", ["name_layers", "ledger", "check"])
def test_an_error_says_the_path(how):
    def main(P):
        model = Encoder(P.reshape(1, 1, 2, 2))
        named_by(how, model)
        x = torch.ones(1, 2, 4, 4)
        texts = []
        for layer in (model.encoder[0][0], *model.encoder[1]):
            with pytest.raises(ValueError, match="one dtype") as error:
                layer(wrong(x))
            texts.append(str(error.value))
        assert [text.partition(" needs")[0] for text in texts] == [
            "encoder.0.0: DistributedPad",
            "encoder.1.0: DistributedPad",
            "encoder.1.1: DistributedFeatureConv2d",  # what DistributedConv2d makes where channels are whole
            "encoder.1.2: Repartition",
        ]
        assert P.allgather_data(texts) == [texts] * 4

    on_workers(4, main)


def test_different_calls_are_told_apart_by_their_paths():
    def main(P):
        first, second = AllSumReduce(P.reshape(2), [0]), Repartition(P.reshape(2), P.reshape(2))
        distdl.name_layers(nn.ModuleDict({"first": first, "second": second}))
        with pytest.raises(CommunicationError, match=r"first: AllSumReduce .* on 0; second: Repartition .* on 1"):
            (first if P.rank == 0 else second)(torch.ones(2))

    on_workers(2, main)


def test_the_ledger_and_a_profile_say_the_path():
    def main(P):
        model = Encoder(P.reshape(1, 1, 2, 2))
        with distdl.ledger(model) as book:
            model(torch.ones(1, 2, 4, 4)).sum().backward()
        paths = {entry.layer.partition(": ")[0] for entry in book.entries}
        assert paths == {f"encoder.{block}.{layer}" for block in range(2) for layer in range(3)}

    on_workers(4, main)
    P = distdl.world()
    model = nn.ModuleDict({"last": Repartition(P.reshape(1, 1), P.reshape(1, 1))})
    distdl.name_layers(model)
    with profile() as trace:
        model["last"](torch.ones(2, 2))
    (event,) = (event for event in trace.key_averages() if "Repartition" in event.key)
    assert event.key.startswith("last: Repartition (P_x: 1x1")


def test_a_layer_copied_after_its_first_call_has_a_path_of_its_own():
    def main(P):
        layer = Repartition(P.reshape(2, 1), P.reshape(1, 2))
        layer(torch.ones(1, 4))
        model = nn.Sequential(layer, nn.Identity(), copy.deepcopy(layer))
        with distdl.ledger(model) as book:
            model[2](torch.ones(1, 4))
        assert {entry.layer.partition(": ")[0] for entry in book.entries} == {"2"}
        assert [str(model[place].label).partition(": ")[0] for place in (0, 2)] == ["0", "2"]

    on_workers(2, main)


COPIED = {  # a layer, and what it is called with
    "elements": (lambda P: DistributedMSELoss(P.reshape(2, 1)), lambda P: [torch.ones(1, 2)] * 2),
    "classes": (
        lambda P: DistributedCrossEntropyLoss(P.reshape(1, 2)),
        lambda P: [torch.ones(3, 2), torch.zeros(3, dtype=torch.int64) if P.rank == 0 else None],
    ),
    "maximum": (
        lambda P: DistributedAdaptiveMaxPool2d(P.reshape(1, 1, 2, 1), 3, return_indices=True),
        lambda P: [torch.ones(1, 1, 2 + P.rank, 3)],
    ),
    "average": (
        lambda P: DistributedAdaptiveAvgPool2d(P.reshape(1, 1, 2, 1), 3),
        lambda P: [torch.ones(1, 1, 2 + P.rank, 3)],
    ),
    "embedding": (
        lambda P: DistributedEmbedding(P[:1], P[:1].reshape(1, 1), P.reshape(2, 1), 6, 2),
        lambda P: [torch.arange(6 if P.rank == 0 else 0)],
    ),
}


@pytest.mark.parametrize("what", COPIED)
def test_all_that_a_copy_sends_is_said_with_its_own_path(what):
    """Also what an operation moves in the middle of its work; after a first call of the original."""
    make, arguments = COPIED[what]

    def main(P):
        first = make(P)
        first(*arguments(P))
        model = nn.ModuleDict({"first": first, "second": copy.deepcopy(first)})
        with distdl.ledger(model) as book:
            model["second"](*arguments(P))
        entries = [(entry.layer.partition(": ")[0], entry.operation) for entry in book.entries]
        assert {path for path, _ in entries} == {"second"}, entries
        assert len({operation for _, operation in entries}) > 1, entries  # an agreement, and something that moves
        with distdl.ledger(model) as book:
            first(*arguments(P))
        assert {entry.layer.partition(": ")[0] for entry in book.entries} == {"first"}

    on_workers(2, main)


def test_without_a_path_the_name_alone_is_said():
    def main(P):
        layer = Repartition(P.reshape(2, 1), P.reshape(1, 2))
        assert str(layer.label) == layer.label.name == f"Repartition (P_x: {layer.P_x}; P_y: {layer.P_y})"
        assert layer.label.kind == "Repartition"

    on_workers(2, main)
