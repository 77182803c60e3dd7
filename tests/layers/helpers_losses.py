"""Check a loss against the sequential one."""

import torch
from torch.nn import functional

from distdl.geometry.boxes import slices
from distdl.nn import Repartition
from distdl.partition.layout import Layout
from distdl.utilities.torch import zero_volume_tensor


def assert_loss_matches(criterion, sequential, x, target, blocks, classes=False, twice=True):
    """Value, gradients and second gradients of a loss, with respect to the input and a target of floating point.

    Args:
        criterion: the loss, with a ``P_x`` and a ``reduction``.
        sequential: takes the global input and target, the same on every worker, and ``reduction``.
        blocks: the intervals of x along each dim.
        classes: whether the target is read on the workers of class index 0 only, and has all classes there.
        twice: whether to compare second gradients.
    """
    P_x, none = criterion.P_x, criterion.reduction == "none"
    rank, inside = P_x.comm.rank, P_x.active
    owned = Layout.of(P_x, blocks)
    holds = inside and not (classes and P_x.index[1])
    x_at = slices(owned[rank]) if inside else ()
    t_at = x_at
    if classes and inside:
        t_at = (x_at[0], slice(None), *x_at[2:]) if target.shape == x.shape else (x_at[0], *x_at[2:])
    loss_at = (x_at[0], *x_at[2:]) if classes and inside else x_at

    def tensors(whole, at, here):
        tensor = whole[at].clone() if here else zero_volume_tensor(dtype=whole.dtype)
        return tensor.requires_grad_(whole.is_floating_point())

    whole = [tensors(x, (), True), tensors(target, (), True)]
    local = [tensors(x, x_at, inside), tensors(target, t_at, holds)]
    expected = sequential(*whole, reduction=criterion.reduction)
    loss = criterion(*local)
    if not none:
        value = expected if P_x.active and P_x.rank == 0 else torch.zeros_like(expected)
        _assert_equal("the loss", loss, value.detach(), expected)
    elif holds:
        _assert_equal("the loss", loss, expected.detach()[loss_at], expected)
    expected, loss = (3 * expected).sum(), (3 * loss).sum()  # the incoming gradient is not 1
    for order in (1, 2) if twice else (1,):
        theirs = torch.autograd.grad(expected, _needed(whole), create_graph=True, materialize_grads=True)
        ours = torch.autograd.grad(loss, _needed(local), create_graph=True, materialize_grads=True)
        for mine, sequentially, tensor, at in zip(ours, theirs, local, (x_at, t_at), strict=False):
            part = sequentially.detach()[at] if inside and tensor.numel() else torch.zeros_like(tensor)
            _assert_equal(f"gradient {order}", mine, part.detach(), sequentially)
        expected, loss = (sum((one**2).sum() for one in grads) for grads in (theirs, ours))
        if not (expected.requires_grad and loss.requires_grad):
            break


UNREADABLE = {  # what is no dense tensor with data, made of one
    "sparse": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "none": lambda x: None,
    "a number": lambda x: 0.5,
}


def assert_works_in_place_behind_a_loss(P, make, sequential, x, target, grid):
    """The losses of elements or places are no views. So what works in place behind them leaves the graph whole where a
    block is empty, and the second derivatives go through the movement before the loss on every worker.
    """
    root, team = P[:1].reshape(*[1] * len(grid)), P[: torch.tensor(grid).prod().item()].reshape(*grid)
    at = slices(Layout.balanced(team, x.shape)[P.rank]) if team.active else None
    local = (x if P.rank == 0 else zero_volume_tensor(x.shape[0], dtype=x.dtype)).clone().requires_grad_()
    if target.shape != x.shape and at is not None:
        at = (at[0], *at[2:])
    losses = make(team)(Repartition(root, team)(local), zero_volume_tensor() if at is None else target[at])
    assert not losses._is_view()
    whole = x.clone().requires_grad_()
    found = []
    for y, of in ((losses, local), (sequential(whole, target, reduction="none"), whole)):
        z = functional.relu(y.clone() if of is whole else y, inplace=True)
        (dx,) = torch.autograd.grad((z**3).sum(), of, create_graph=True)
        (dx**2).sum().backward()
        found.append((dx, of.grad))
    if P.rank == 0:
        for ours, theirs in zip(*found, strict=True):
            _assert_equal("a gradient", ours, theirs.detach(), theirs)


def _needed(tensors):
    return [tensor for tensor in tensors if tensor.requires_grad]


def _assert_equal(what, ours, theirs, scale):
    assert ours.shape == theirs.shape, f"{what}: {list(ours.shape)} and not {list(theirs.shape)}"
    largest = scale.detach().nan_to_num().abs().max().item() if scale.numel() else 0.0
    close = torch.allclose(ours.detach(), theirs, rtol=1e-10, atol=1e-10 * largest + 1e-300, equal_nan=True)
    assert close, f"{what}: {ours} and not {theirs}"
