"""Activation checkpoints of global tensors."""

import torch
from launched import assert_close, on_workers, split
from same import noise
from torch.nn import functional as F

x35 = noise(3, 5)


@on_workers
def test_a_recomputed_forward_is_intercepted_in_backward():
    x = split(x35).requires_grad_()
    y = torch.utils.checkpoint.checkpoint(lambda a: F.gelu(a).sum(0).exp(), x, use_reentrant=False)
    y.sum().backward()
    plain = x35.clone().requires_grad_()
    F.gelu(plain).sum(0).exp().sum().backward()
    assert_close(x.grad, plain.grad)
