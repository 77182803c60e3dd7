"""Recycled memory: it comes back when the last tensor over it dies, and not before."""

import threading

import pytest
import torch

from distdl import memory

LARGE = (memory.SMALLEST // 4,)


@pytest.fixture
def pool(monkeypatch):
    made = memory.Pool(8 * memory.SMALLEST)
    monkeypatch.setattr(memory, "pool", made)
    return made


def test_memory_comes_back_when_the_last_tensor_over_it_dies(pool):
    y = memory.empty(LARGE, torch.float32)
    address = y.data_ptr()
    view = y.view(-1, 2)[1:]
    del y
    assert pool.idle == 0
    assert memory.empty(LARGE, torch.float32).data_ptr() != address
    view.fill_(3.0)
    assert view.sum() == 3 * view.numel()
    idle = pool.idle
    del view
    assert pool.idle == idle + memory.SMALLEST
    assert memory.empty(LARGE, torch.float32).data_ptr() == address


def test_what_autograd_saved_keeps_its_memory(pool):
    x = memory.empty(LARGE, torch.float32).fill_(2.0).requires_grad_()
    y = x * memory.empty(LARGE, torch.float32).fill_(5.0)
    others = [memory.empty(LARGE, torch.float32).fill_(7.0) for _ in range(3)]
    y.sum().backward()
    assert (x.grad == 5).all() and len(others) == 3


def test_near_sizes_share_memory_and_other_dtypes_too(pool):
    y = memory.empty((300, 300), torch.float32)
    address = y.data_ptr()
    del y
    assert memory.empty((299, 150), torch.float64).data_ptr() == address


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (3,), (300, 500), (2, 300, 500)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.complex128])
def test_tensors_are_like_those_of_torch(pool, shape, dtype):
    ours, theirs = memory.empty(shape, dtype), torch.empty(shape, dtype=dtype)
    assert ours.shape == theirs.shape and ours.stride() == theirs.stride() and ours.dtype == theirs.dtype
    assert ours.is_contiguous() and not ours._is_view() and ours.data_ptr() % 64 == 0


def test_at_most_the_limit_lies_idle_and_0_switches_it_off(pool):
    tensors = [memory.empty(LARGE, torch.float32) for _ in range(12)]
    del tensors
    assert pool.idle == pool.limit
    off = memory.Pool(0)
    block = off.take(memory.SMALLEST)
    del block
    assert off.idle == 0


def test_threads_share_the_pool(pool):
    def work():
        for value in range(200):
            y = memory.empty(LARGE, torch.float32).fill_(float(value))
            assert (y == value).all()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.idle <= pool.limit
