"""Values that Python asks for: numbers, arrays and assertions of global tensors."""

import pytest
import torch
from launched import assert_close, on_workers, split
from same import noise

from distdl import GlobalTensor

x35 = noise(3, 5)


@on_workers
def test_values_tables_and_constants():
    """``.item()`` in a forward, ``.data`` of a tensor, ``torch.as_tensor``, NumPy of a tensor."""
    x = split(x35).requires_grad_()
    assert_close(x / x.abs().sum().item(), x35 / x35.abs().sum())
    assert_close(x.data * 2, x35 * 2)
    assert not x.data.requires_grad
    assert type(torch.as_tensor(x)) is GlobalTensor
    assert x.detach().numpy().tolist() == x35.tolist()


@on_workers
def test_as_tensor_of_another_dtype_has_a_gradient():
    """Torch asks nobody there, but for a copy below autograd."""
    given = []
    for x in (split(x35), x35.clone()):
        x.requires_grad_()
        y = torch.as_tensor(x, dtype=torch.complex128) * 1j + torch.as_tensor((x * 2).exp(), dtype=torch.float32)
        y.abs().square().sum().backward()
        given += [y, x.grad]
    assert_close(given[0], given[2])
    assert_close(given[1], given[3])


@pytest.mark.filterwarnings("error:.*has no op")
@on_workers
def test_an_assertion_of_a_value_is_that_of_every_worker():
    x = split(x35)
    torch._assert_async((x < 100).all(), "too large")
    with pytest.raises(RuntimeError, match="too small"):
        torch._assert_async((x > 100).all(), "too small")
