"""Helpers of the published interface: thin names over boxes and tensors."""

from distdl.utilities import slicing, torch

__all__ = ["slicing", "torch"]
