"""Tensors in nested arguments."""

from collections import OrderedDict, namedtuple

import pytest
import torch

from distdl.globals.tensor.structures import map_tensors, tensors_in

Pair = namedtuple("Pair", "first second")


def test_tensors_are_found_in_their_order():
    a, b, c, d, e = (torch.tensor(n) for n in range(5))
    given = ((a, [1, "b", Pair(b, None)], torch.Size([2])), OrderedDict(z=c, y={"x": [d]}), {1, 2}, e)
    assert list(map(int, tensors_in(given))) == [0, 1, 2, 3, 4]
    assert list(map(int, tensors_in(map_tensors(given, lambda one: one + 1)))) == [1, 2, 3, 4, 5]
    assert len(tensors_in(torch.ones(2, 2).max(0))) == 2 and tensors_in(a)[0] is a
    assert tensors_in(()) == tensors_in(None) == tensors_in({}) == []


@pytest.mark.parametrize("function", [tensors_in, lambda given: map_tensors(given, torch.neg)])
def test_what_contains_itself_is_an_error(function):
    given = [torch.ones(1)]
    given.append(given)
    with pytest.raises(RecursionError):
        function(given)
