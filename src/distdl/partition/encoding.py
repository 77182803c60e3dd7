"""A small, safe encoding of values into bytes: what ``broadcast_data`` and its kin put into messages.

Decoding builds numbers, strings, arrays and containers and nothing else; no code of the sender's choosing is ever run
(which is why this is not pickle). All numbers are little-endian.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch

from distdl.tensors.dtypes import DTYPES, dtype_code
from distdl.tensors.memory import readable
from distdl.transport.communicator import as_bytes

_ARRAY_KINDS = "biufcSUmM"
_ARRAY_DTYPE = re.compile(rf"[<>|][{_ARRAY_KINDS}]\d{{1,18}}(\[\d{{0,9}}[A-Za-z]{{1,2}}\])?")


def encode(value: Any) -> bytes:
    """The bytes of a value.

    Args:
        value: None, a bool, int, float, complex, str, bytes, NumPy array or scalar, tensor (its values only: not its
            gradient nor its device), or a tuple, list or dict of these.
    Raises: ValueError for anything else, and for containers that are nested too deeply.
    """
    try:
        return _encode_one(value)
    except RecursionError:
        raise ValueError("cannot send a value whose containers are nested so deeply (or contain themselves)") from None


def _encode_one(value: Any) -> bytes:
    for kind, accepts, write, _ in _KINDS:
        if accepts(value):
            return kind + _sized(write(value))
    raise ValueError(
        f"cannot send a value of type {type(value).__name__}; numbers, strings, NumPy arrays, tensors, None, and "
        f"tuples, lists and dicts of these can be sent"
    )


def decode(message: bytes) -> Any:
    """The value whose :func:`encode` gives these bytes.

    Raises: ValueError, and nothing else, if they are not the bytes of exactly one value.
    """
    try:
        value, rest = _decode_one(memoryview(message))
        if len(rest):
            raise ValueError(f"{len(rest)} bytes are left over")
    except Exception as error:  # whatever the readers of its parts make of bytes that nobody has encoded
        raise ValueError(f"a message could not be decoded: {error}") from error
    return value


def _decode_one(message: memoryview) -> tuple[Any, memoryview]:
    kind = bytes(message[:1])
    body, rest = _cut(message[1:])
    if kind not in _READERS:
        raise ValueError(f"{kind!r} is no kind of value")
    return _READERS[kind](body), rest


def _sized(body: bytes) -> bytes:
    return struct.pack("<Q", len(body)) + body


def _cut(message: memoryview) -> tuple[memoryview, memoryview]:
    (length,) = struct.unpack_from("<Q", message)
    if length > len(message) - 8:
        raise ValueError(f"it ends {length - len(message) + 8} bytes early")
    return message[8 : 8 + length], message[8 + length :]


def _write_int(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _write_dims(shape: tuple[int, ...]) -> bytes:
    return struct.pack(f"<B{len(shape)}Q", len(shape), *shape)


def _cut_dims(body: memoryview) -> tuple[tuple[int, ...], memoryview]:
    count = body[0]
    return struct.unpack_from(f"<{count}Q", body, 1), body[1 + 8 * count :]


def _is_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in _ARRAY_KINDS


def _write_array(value: Any) -> bytes:
    array = np.ascontiguousarray(value)
    return _sized(array.dtype.str.encode()) + _write_dims(np.shape(value)) + array.tobytes()


def _read_array(body: memoryview) -> Any:
    name, body = _cut(body)
    text = bytes(name).decode("ascii")
    if not _ARRAY_DTYPE.fullmatch(text):  # NumPy reads far more than it writes, some of it by Python's parser
        raise ValueError(f"it has an array of {text!r}")
    dtype = np.dtype(text)
    shape, body = _cut_dims(body)
    return np.frombuffer(body, dtype).reshape(shape).copy()


def _write_tensor(value: torch.Tensor) -> bytes:
    with torch._C.DisableTorchFunctionSubclass():  # functions of a global tensor would send messages
        plain = readable(value.detach()).cpu().contiguous()
        content = as_bytes(plain).numpy().tobytes()
    return bytes([dtype_code(value.dtype)]) + _write_dims(tuple(value.shape)) + content


def _read_tensor(body: memoryview) -> torch.Tensor:
    dtype = DTYPES[body[0]]
    shape, body = _cut_dims(body[1:])
    if prod(shape) * dtype.itemsize != len(body):
        raise ValueError(f"{len(body)} bytes for a tensor of {list(shape)} {dtype}")
    if not len(body):
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(body), dtype=dtype).reshape(shape)


def _read_items(body: memoryview) -> list[Any]:
    items = []
    while len(body):
        item, body = _decode_one(body)
        items.append(item)
    return items


def _of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


# A row: the first byte of the message, which values it is for, to bytes, from bytes. The first row that accepts a value
# writes it.
_KINDS: tuple[tuple[bytes, Callable[[Any], bool], Callable[[Any], bytes], Callable[[memoryview], Any]], ...] = (
    (b"g", lambda value: isinstance(value, np.generic) and _is_array(value), _write_array,
     lambda body: _read_array(body)[()]),
    (b"n", lambda value: value is None, lambda value: b"", lambda body: None),
    (b"b", _of(bool), lambda value: bytes([value]), lambda body: bool(body[0])),
    (b"i", _of(int), _write_int, lambda body: int.from_bytes(body, "little", signed=True)),
    (b"f", _of(float), lambda value: struct.pack("<d", value), lambda body: struct.unpack("<d", body)[0]),
    (b"c", _of(complex), lambda value: struct.pack("<2d", value.real, value.imag),
     lambda body: complex(*struct.unpack("<2d", body))),
    (b"s", _of(str), lambda value: value.encode("utf-8", "surrogatepass"),
     lambda body: bytes(body).decode("utf-8", "surrogatepass")),
    (b"y", _of(bytes), lambda value: value, bytes),
    (b"a", _is_array, _write_array, _read_array),
    (b"T", lambda value: isinstance(value, torch.Tensor), _write_tensor, _read_tensor),
    (b"t", _of(tuple), lambda value: b"".join(map(_encode_one, value)), lambda body: tuple(_read_items(body))),
    (b"l", _of(list), lambda value: b"".join(map(_encode_one, value)), _read_items),
    (b"d", _of(dict), lambda value: b"".join(map(_encode_one, value.items())), lambda body: dict(_read_items(body))),
)  # fmt: skip
_READERS = {kind: read for kind, _, _, read in _KINDS}
