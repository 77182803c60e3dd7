"""Attributes of global tensors that are set: the data of a tensor."""

import pytest
import torch
from launched import assert_close, on_workers, split
from same import noise
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

import distdl

x35 = noise(3, 5)


@on_workers
def test_the_data_of_a_plain_tensor_is_never_that_of_a_global_one():
    """Torch asks nobody there; reading it ended the process."""
    x, plain, weight = split(x35), x35.clone(), torch.nn.Parameter(x35.clone())
    for target in (plain, weight):
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            target.data = x
        assert_close(target * 2, 2 * x35)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        torch.nn.utils.vector_to_parameters(x.reshape(-1), [weight])
    torch.nn.utils.vector_to_parameters(x35.reshape(-1) * 2, [own := (x * 1).requires_grad_()])
    assert_close(own, 2 * x35)
    (grouped,) = _group_tensors_by_device_and_dtype([[x]])
    assert grouped == (torch.device("cpu"), torch.float64)


@on_workers
def test_data_of_another_layout():
    """It is one memory, as in torch, and no more once there is other data."""
    P = distdl.world()
    other = distdl.distribute_tensor(noise(3, 5, seed=1), P.reshape(1, -1))
    for first, second in ((0, 1), (1, 0)):
        pair = split(x35), other.clone()
        pair[0].data = pair[1]
        assert_close(pair[0], noise(3, 5, seed=1))
        pair[first].add_(1)
        assert_close(pair[second], noise(3, 5, seed=1) + 1)
    x, own = split(x35), split(x35)
    x.data = other  # for a while, as evaluations with averaged weights do
    x.data = own
    x.add_(1)
    assert_close(other * 1, noise(3, 5, seed=1))
    assert_close(own, x35 + 1)
    part = split(x35)
    copy = part.view(15)
    part.data = split(x35 * 3)
    part.add_(1)
    assert_close(copy, x35.view(15))


doubles = torch.linspace(0, 1, 8, dtype=torch.float64).reshape(2, 4)


def test_dims_have_no_names():
    def work():
        x = distdl.distribute_tensor(doubles, distdl.world().reshape(1, 2))
        with pytest.raises(AttributeError, match=r"Say dims by their numbers; x\.layout tells how each is split"):
            x.names  # noqa: B018
        assert hasattr(x, "names") == hasattr(doubles, "names")

    distdl.run_workers(work, 2)
