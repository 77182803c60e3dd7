"""Normalising flows: the likelihood of a batch, and training by it."""

from __future__ import annotations

import normflows
import torch
import zuko
from judge import Global, noise, program
from nflows import distributions, flows, transforms
from torch import nn

LIBRARIES = ["zuko", "nflows", "normflows"]
GRIDS = [(2, 1), (3, 1)]


class Likelihood(nn.Module):
    """A flow whose forward gives the log-likelihood of each sample."""

    def __init__(self, flow, log_prob):
        super().__init__()
        self.flow, self.log_prob = flow, log_prob

    def forward(self, x, *context):
        return self.log_prob(self.flow, x, *context)


def ask(flow, x):
    return flow.log_prob(x)


def ask_zuko(flow, x, *context):
    return flow(*context).log_prob(x)


def train(model, x, *context):
    """Return the likelihoods of the first batch, and the losses of three steps of Adam."""
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    history = []
    for _ in range(3):
        optimiser.zero_grad()
        likelihoods = model(x, *context)
        loss = -likelihoods.mean()
        loss.backward()
        optimiser.step()
        history.append(likelihoods.detach())
    return history


def parts(flow, log_prob=ask, context=()):
    return train, Likelihood(flow, log_prob), Global(noise(7, 4).requires_grad_()), *context


@program("zuko", name="NSF, three steps of Adam", grids=GRIDS)
def spline():
    return parts(zuko.flows.NSF(4, transforms=2, hidden_features=[8]), ask_zuko)


@program("zuko", name="MAF with a context, three steps of Adam", grids=GRIDS)
def masked():
    flow = zuko.flows.MAF(4, 3, transforms=2, hidden_features=[8])
    return parts(flow, ask_zuko, (Global(noise(7, 3, seed=1)),))


@program("zuko", name="NICE, three steps of Adam, sharded weights", grids=GRIDS, weights="sharded")
def nice():
    return parts(zuko.flows.NICE(4, transforms=2, hidden_features=[8]), ask_zuko)


@program("nflows", name="ActNorm and MaskedAffineAutoregressiveTransform, three steps of Adam", grids=GRIDS)
def autoregressive():
    steps = [
        transforms.ActNorm(4),
        transforms.MaskedAffineAutoregressiveTransform(features=4, hidden_features=8),
        transforms.ReversePermutation(features=4),
        transforms.MaskedAffineAutoregressiveTransform(features=4, hidden_features=8),
    ]
    return parts(flows.Flow(transforms.CompositeTransform(steps), distributions.StandardNormal([4])))


def glow():
    net = normflows.nets.MLP([2, 8, 4], init_zeros=False)
    layers = [normflows.flows.AffineCouplingBlock(net), normflows.flows.Permute(4), normflows.flows.ActNorm(4)]
    return normflows.NormalizingFlow(normflows.distributions.DiagGaussian(4), layers)


@program("normflows", name="AffineCouplingBlock and ActNorm, three steps of Adam", grids=GRIDS)
def coupling():
    return parts(glow())


# ActNorm writes its weights at its first batch. Shares are not written during a forward, so that batch comes before.
@program(
    "normflows",
    name="AffineCouplingBlock and ActNorm after their first batch, three steps of Adam, sharded weights",
    grids=GRIDS,
    weights="sharded",
)
def coupling_in_shares():
    flow = glow()
    with torch.no_grad():
        flow.log_prob(noise(7, 4))
    return parts(flow)


@program("normflows", name="CoupledRationalQuadraticSpline, three steps of Adam", grids=GRIDS)
def quadratic_splines():
    layers = [normflows.flows.CoupledRationalQuadraticSpline(4, 1, 8)]
    return parts(normflows.NormalizingFlow(normflows.distributions.DiagGaussian(4), layers))
