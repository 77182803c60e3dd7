"""Helpers of the published interface: thin names over boxes and tensors."""

from distdl.utilities import debug, dtype, index_tricks, slicing, tensor_decomposition, torch

__all__ = ["debug", "dtype", "index_tricks", "slicing", "tensor_decomposition", "torch"]
