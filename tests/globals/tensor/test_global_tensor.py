"""The type of a global tensor, as libraries see it that look at types."""

import pytest
import torch
from launched import on_workers, split
from same import noise

x35 = noise(3, 5)


@on_workers
def test_libraries_choose_by_the_module_of_the_class():
    x = split(x35)
    assert type(x).__module__.split(".")[0] == "torch"
    assert isinstance(x, torch.Tensor) and torch.is_tensor(x) and torch.jit.isinstance(x, torch.Tensor)


@on_workers
def test_another_class_of_tensors_is_shed_but_never_taken_on():
    x = split(x35)
    assert x.as_subclass(torch.Tensor) is x
    with pytest.raises(TypeError, match="a global tensor cannot be a Parameter"):
        x.as_subclass(torch.nn.Parameter)


@on_workers
def test_scripted_functions_never_compute_on_a_block():
    scripted = torch.jit.script(_twice)
    with pytest.raises(RuntimeError):
        scripted(split(x35))


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2
