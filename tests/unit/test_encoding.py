import contextlib
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from distdl.partition.encoding import decode, encode
from distdl.tensors.dtypes import DTYPES, dtype_code

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.complex_numbers(allow_nan=False), st.text(),
    st.binary(),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(), inner, max_size=4),
    ),
    max_leaves=12,
)


@given(VALUES)
def test_values_come_back(value):
    back = decode(encode(value))
    assert back == value and type(back) is type(value)


@given(
    hnp.arrays(
        st.sampled_from(["<f4", ">f8", "i2", "u8", "?", "c8", "S3", "U2", "M8[ns]"]),
        hnp.array_shapes(min_dims=0, min_side=0),
    )
)
def test_arrays_come_back(array):
    back = decode(encode(array))
    assert back.dtype == array.dtype and back.shape == array.shape and back.tobytes() == array.tobytes()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (3, 0, 2)])
def test_tensors_come_back(dtype, shape):
    count = int(np.prod(shape, dtype=int))
    tensor = torch.arange(count * 16, dtype=torch.uint8)[: count * dtype.itemsize].view(dtype).reshape(shape)
    back = decode(encode(tensor))
    assert back.dtype == dtype and back.shape == tensor.shape
    assert encode(back) == encode(tensor)


def test_numpy_scalars_sizes_and_strided_tensors():
    assert decode(encode(np.float32(1.5))) == np.float32(1.5) and type(decode(encode(np.int16(3)))) is np.int16
    assert decode(encode(torch.Size([2, 3]))) == (2, 3)
    assert torch.equal(decode(encode(torch.tensor(2.0).expand(1, 1))), torch.tensor([[2.0]]))
    tensor = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(decode(encode(tensor)), tensor)
    assert not decode(encode(tensor.clone().requires_grad_())).requires_grad


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: 0, np.array([object()]), [object()], {"a": object()}])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match="cannot send a value of type"):
        encode(value)


def test_dtypes_without_a_code_are_refused():
    with pytest.raises(ValueError, match="cannot move"):
        dtype_code(torch.qint8)


@given(st.binary(max_size=64))
def test_decoding_arbitrary_bytes_gives_a_value_or_a_value_error(message):
    with contextlib.suppress(ValueError):
        encode(decode(message))


@given(VALUES.filter(lambda value: value is not None), st.integers(1, 9))
def test_a_message_that_ends_early_or_late_is_refused(value, count):
    message = encode(value)
    for damaged in (message[:-count], message + b"\0" * count):
        with pytest.raises(ValueError, match="could not be decoded"):
            decode(damaged)


CONTENTS = st.one_of(
    VALUES,
    hnp.arrays(st.sampled_from(["<f4", "i2", "?", "c8", "S3", "U2", "M8[ns]"]), hnp.array_shapes(max_side=2)),
    st.sampled_from([torch.ones(2, 3), torch.zeros(0, 4), np.float32(1.5), [np.ones(2), {"a": torch.ones(1)}]]),
)


@given(
    CONTENTS, st.lists(st.tuples(st.integers(0), st.integers(0, 255), st.sampled_from("sid")), min_size=1, max_size=4)
)
@settings(max_examples=400)
def test_a_mutated_message_gives_a_value_or_a_value_error(value, changes):
    """Bytes are set, inserted and deleted anywhere in a message."""
    message = bytearray(encode(value))
    for place, byte, kind in changes:
        at = place % (len(message) + 1)
        message[at : at + (kind != "i")] = b"" if kind == "d" else bytes([byte])
    with contextlib.suppress(ValueError):
        decode(bytes(message))


def _array_of(dtype, body=b"\0" * 8):
    content = struct.pack("<Q", len(dtype)) + dtype + struct.pack("<BQ", 1, 1) + body
    return b"a" + struct.pack("<Q", len(content)) + content


def _nested(depth):
    lists = (b"l" + struct.pack("<Q", 9 * inner) for inner in range(depth, 0, -1))  # (a head has 9 bytes)
    return b"".join(lists) + b"n" + bytes(8)


@pytest.mark.parametrize("message", [
    _array_of(b"(2"), _array_of(b"f4,"), _array_of(b"<f4,<i4"), _array_of(b"O"), _array_of(b"|V8"), _array_of(b"{"),
    _array_of(b"<M8[x]"), _array_of(b"<U999999999999999999"), _array_of(b"a8"), _array_of(b"a" * 9), _nested(100_000),
    b"T" + struct.pack("<Q", 18) + bytes([0, 2]) + struct.pack("<2Q", 1 << 63, 0),
    b"d" + struct.pack("<Q", 9) + b"n" + bytes(8),
], ids=range(13))  # fmt: skip
def test_messages_that_raised_other_errors_are_value_errors(message):
    """NumPy raised SyntaxError and DeprecationWarning for names of dtypes, and nesting RecursionError."""
    with pytest.raises(ValueError, match="a message could not be decoded"):
        decode(message)


def test_containers_nested_too_deeply_are_refused_by_the_sender():
    value = []
    value.append(value)
    with pytest.raises(ValueError, match="nested so deeply"):
        encode(value)
    assert decode(encode([[[[]]]])) == [[[[]]]]
