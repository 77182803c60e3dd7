"""What several tests of layers need."""

import copy
import random

import pytest
import torch

import distdl


def filled(module):
    """A module in float64 whose parameters are the same on every worker."""
    module = module.double()
    for number, parameter in enumerate(module.parameters()):
        generator = torch.Generator().manual_seed(number)
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module


def noise(*shape, seed=0):
    """The same random tensor on every worker."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def take_weights(layer, reference):
    """Give a layer this worker's blocks of the weights of the sequential one."""
    for (name, layout), parameter in zip(layer.parameter_layouts.items(), reference.parameters(), strict=True):
        layer.get_parameter(name).data = layout.block(parameter.data).clone()


def penalty(network, x, power=2):
    """A function of the gradient by x, so that its own derivatives are second ones."""
    (dx,) = torch.autograd.grad((network(x) ** 3).sum(), x, create_graph=True)
    return (dx**power).sum()


def share(cases, number, of):
    """One of so many shares of the cases, which are mixed: those of the numbers 0 to ``of`` - 1 together are all."""
    return random.Random(0).sample(cases, len(cases))[number % of :: of]


def gathered(P, layout, y):
    """The global tensor of which each worker has a block, on all of them."""
    parts = P.allgather_data(y)
    whole = torch.zeros(layout.extents, dtype=y.dtype)
    for worker in layout:
        whole[tuple(slice(*interval) for interval in layout[worker])] = parts[worker].detach()
    return whole


def on_workers(workers, main):
    """Run on threads; every worker has to come to the end."""
    assert distdl.run_workers(lambda: main(distdl.world()) or "done", workers) == ["done"] * workers


def every_worker_raises(workers, main, kind=ValueError):
    """The text of the error that ``main`` raises on every worker: it has to be the same."""

    def catch():
        try:
            main(distdl.world())
        except kind as error:
            return str(error)
        return None

    texts = distdl.run_workers(catch, workers)
    assert texts[0] is not None and len(set(texts)) == 1, texts
    return texts[0]


def assert_options(layer, **options):
    """The layer has these options and no others can be set; its copies are the same."""
    for name, value in options.items():
        for one in (layer, copy.deepcopy(layer)):
            assert getattr(one, name) == value, name
            with pytest.raises(AttributeError, match=rf"{type(layer).__name__} keeps the {name} .* build a new layer"):
                setattr(one, name, value)
            with pytest.raises(AttributeError, match=name):
                delattr(one, name)
            assert getattr(one, name) == value
