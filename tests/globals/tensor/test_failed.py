"""What has failed on one worker, and not on the others."""

import pytest
import torch
from launched import assert_close, assert_told_apart
from same import noise

import distdl

_BACKWARDS = {"backward": lambda y, x: y.backward(), "grad": torch.autograd.grad}


def _fail_in_backward(x, backward):
    """Differentiate a product of what was written since: torch's error."""
    factor = x * 2
    product = factor @ factor
    factor.add_(1)
    backward(product.sum(), x)


@pytest.mark.parametrize("backward", _BACKWARDS.values(), ids=_BACKWARDS)
def test_a_backward_that_fails_where_one_worker_computes(backward):
    """It alone has saved what was written. If it is caught there, the others would wait, or be out of step."""

    def work():
        alone = distdl.world().create_partition_inclusive([0])
        x = distdl.distribute_tensor(noise(3, 3), alone.reshape(1, 1)).requires_grad_()
        _fail_in_backward(x, backward)
        x.sum().item()

    assert_told_apart(work, 3, "a backward that has failed (RuntimeError: one of the variables needed for gradient")


@pytest.mark.parametrize("backward", _BACKWARDS.values(), ids=_BACKWARDS)
def test_workers_go_on_after_a_backward_that_has_failed_on_all(backward):
    def work():
        x = distdl.distribute_tensor(noise(4, 4), distdl.world().reshape(3, 1)).requires_grad_()
        factor = x * 2
        squares = factor * factor
        factor.add_(1)
        with pytest.raises(RuntimeError, match="one of the variables needed for gradient") as raised:
            backward(squares.sum(), x)
        assert type(raised.value) is RuntimeError
        assert_close(torch.autograd.grad((x * x).sum(), x)[0], 2 * noise(4, 4))

    distdl.run_workers(work, 3)
