"""PyTorch Geometric: layers over nodes and edges that are both split."""

from __future__ import annotations

from functools import partial

import torch
from judge import Global, noise, program
from torch import nn
from torch_geometric import nn as geometric

LIBRARIES = ["torch_geometric"]
GRIDS = [(2, 1), (3, 1)]


class Net(nn.Module):
    """Two layers of one kind."""

    def __init__(self, make):
        super().__init__()
        self.first, self.second = make(5, 8), make(8, 3)

    def forward(self, x, edges):
        return self.second(self.first(x, edges).relu(), edges)


def train(model, x, edges, labels):
    y = model(x, edges)
    loss = nn.functional.cross_entropy(y, labels)
    loss.backward()
    return loss, y


def parts(make):
    nodes = torch.arange(11)
    edges = torch.stack([nodes.repeat(3), torch.cat([(nodes * k + k) % 11 for k in (1, 2, 3)])])
    return (
        train,
        Net(make),
        Global(noise(11, 5).requires_grad_()),
        Global(edges, axes=(None, 0)),
        Global(nodes % 3, axes=(0,)),
    )


def enter(name, make):
    program("torch_geometric", name=f"{name}, two layers", grids=GRIDS)(partial(parts, make))


enter("GCNConv", geometric.GCNConv)
enter("SAGEConv", geometric.SAGEConv)
enter("GATConv", geometric.GATConv)
enter("GINConv", lambda n, m: geometric.GINConv(nn.Linear(n, m)))
enter("TransformerConv", geometric.TransformerConv)
