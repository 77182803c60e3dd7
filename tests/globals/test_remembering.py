"""What rehearsals know of the shapes that torch's operators give: the same as torch says, each time anew."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

from distdl.globals.models.rehearsal import rehearse
from distdl.globals.models.remembering import Memory, Remembering
from distdl.globals.models.summary import Totals


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def seen(function, known):
    """Shapes, strides, dtypes and bytes of all that a function gives, and which of these share a memory."""
    with Remembering(known):
        given = function()
    listed = list(given) if isinstance(given, (tuple, list)) else [given]
    storages = [None if one is None else one.untyped_storage()._cdata for one in listed]
    told = [
        one
        if one is None
        else (
            one.shape,
            one.stride(),
            one.dtype,
            one.is_conj(),
            one._is_zerotensor(),
            one.untyped_storage().nbytes(),
            one._version,
        )
        for one in listed
    ]
    return type(given), told, [storages.index(one) for one in storages]


OWN = torch.library.Library("distdl_remembering", "DEF")
for schema, function in (("conjugate(Tensor x) -> Tensor", lambda x: x.clone().conj()),
                         ("times(Tensor x, Dict(str, int) by) -> Tensor", lambda x, by: x * by["n"])):  # fmt: skip
    OWN.define(schema)
    OWN.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")

CALLS = {
    "batch norm": lambda: torch.native_batch_norm(empty(2, 3, 4), None, None, None, None, True, 0.1, 1e-5),
    "backward": lambda: torch.ops.aten.convolution_backward(
        empty(1, 2, 3), empty(1, 2, 3), empty(2, 2, 1), [0], [1], [0], [1], False, [0], 1, [True, True, False]
    ),
    "a number": lambda: empty(3, dtype=torch.int32) * 2,
    "a fraction": lambda: empty(3, dtype=torch.int32) * 2.0,
    "a truth": lambda: empty(3, dtype=torch.bool) * True,
    "the number of it": lambda: empty(3, dtype=torch.bool) * 1,
    "strides": lambda: empty(3, 4).t() + empty(4, 3),
    "channels last": lambda: F.conv2d(empty(1, 2, 5, 5).to(memory_format=torch.channels_last), empty(3, 2, 2, 2)),
    "in place": lambda: empty(3).add_(empty(3)),
    "resized": lambda: torch.add(empty(3), 1, out=empty(0)),
    "another memory": lambda: empty(3).set_(empty(3)),
    "a view": lambda: torch.ops.aten._unsafe_view(empty(4, 3), (12,)),
    "expanded": lambda: empty(3, 1).expand(3, 4) + empty(4),
    "conjugate": lambda: empty(3, dtype=torch.complex64).conj() * empty(3),
    "imaginary": lambda: torch.add(empty(3, dtype=torch.complex64).conj().imag, 1),
    "parts": lambda: torch.split_with_sizes_copy(empty(5, 2), [2, 3]),
    "nothing": lambda: torch.ops.aten._assert_async(empty(dtype=torch.bool)),
    "conjugate as told": lambda: torch.ops.distdl_remembering.conjugate(empty(3, dtype=torch.complex64)),
    "named numbers": lambda: torch.ops.distdl_remembering.times(empty(3), {"n": 2}),
    "zeros that are not written": lambda: torch._efficientzerotensor((3,), device="meta"),
    "what follows from these": lambda: torch.neg(torch._efficientzerotensor((3,), device="meta")),
    "beside memory": lambda: empty(3, dtype=torch.int32) * torch.tensor(2.5),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_is_known_is_what_torch_says(call):
    known, expected = Memory(), seen(CALLS[call], Memory())
    assert seen(CALLS[call], known) == expected
    assert seen(CALLS[call], known) == expected


def test_calls_that_are_equal_to_python_are_apart():
    known = Memory()
    for call, dtype in (("a number", torch.int32), ("a fraction", torch.float32), ("a truth", torch.bool),
                        ("the number of it", torch.int64)):  # fmt: skip
        assert seen(CALLS[call], known)[1][0][2] is dtype


def test_tensors_made_of_others_are_no_plain_ones():
    """Whichever of them has come first, what they give is of their class, or is none of it."""
    for first in (0, 1):
        known, given = Memory(), (empty(3), TwoTensor(empty(3), empty(3)))
        for one in (given[first], given[1 - first]) * 2:
            with Remembering(known):
                assert type(one * 2) is type(one)


def test_derivatives_forward_are_known():
    """Torch multiplies tangents by zeros that it does not write, and refuses others in their place."""
    known = Memory()
    for _ in range(2):
        with Remembering(known), forward_ad.dual_level():
            y = forward_ad.make_dual(empty(3), empty(3)) * 2
            assert forward_ad.unpack_dual(y).tangent.shape == (3,)


def test_errors_stay():
    with Remembering(Memory()):
        for _ in range(2):
            with pytest.raises(RuntimeError):
                empty(3) + empty(4)


def test_models_share_what_is_known():
    """A second rehearsal asks torch for nothing new, and finds the same."""
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU(), torch.nn.Flatten())
    known, workers = Memory(), torch.arange(4).reshape(1, 1, 2, 2).numpy()
    found = []
    for memory in (known, known, Memory()):
        one = rehearse(model, workers, 4, 1, [torch.empty(3, 2, 9, 8)], True, memory)
        found.append((Totals.of(one), len(memory)))
    assert found[0] == found[1] == found[2] and known
