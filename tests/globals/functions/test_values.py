"""Values that Python asks for: numbers, arrays and assertions of global tensors."""

import pytest
import torch
from launched import assert_close, on_workers, split
from same import noise

import distdl
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


def me():
    return distdl.world().comm.rank


@on_workers
def test_values_come_to_every_worker():
    x, total = split(x35), split(x35).sum()
    value = float(x35.sum())
    for found in (total.item(), float(total), total.tolist(), total.numpy().item(), float(f"{total:.12f}")):
        assert found == pytest.approx(value, abs=1e-11)
    assert bool(total > 0) == (value > 0) and int(total * 100) == int(value * 100)
    assert x.tolist() == x35.tolist()
    assert "GlobalTensor(" in repr(total) and f"{value:.4f}" in repr(total)
    held = {0: "worker 0 holds [0:2, 0:5]", 1: "worker 1 holds [2:3, 0:5]", 2: "worker 2 holds nothing"}
    assert "shape=(3, 5), dtype=torch.float64, over 2x1" in repr(x) and held[me()] in repr(x)
    for wrong in (x.item, lambda: bool(x), lambda: float(x)):
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            wrong()


@pytest.mark.fault("threads")
def test_a_value_for_which_one_worker_asks_is_an_error_that_says_so():
    def work():
        total = split(x35).sum()
        if me() == 0:
            print(total)
        split(x35).sum(1).sum()
        distdl.world().allgather_data(0)

    with pytest.raises(distdl.CommunicationError, match="for which every worker has to ask"):
        distdl.run_workers(work, 3)


@on_workers
def test_a_global_tensor_is_no_value_to_send():
    """Asking it for its memory would be messages, which the workers that send no value do not make."""
    P, x = distdl.world(), split(x35)
    for value in (x, x.sum(), {"a": [x[:0]]}):
        for send in (P.broadcast_data, P.allgather_data, P.allreduce_data):
            with pytest.raises(ValueError, match=r"^worker 0: .*(a GlobalTensor, which wraps|reached a global tensor)"):
                send(value if me() == 0 else 0)
    assert P.allgather_data(me()) == [0, 1, 2]
