"""distdl: model-parallel deep learning for PyTorch, done as linear algebra."""

from distdl.cartesian import CartesianPartition
from distdl.comm import CommunicationError
from distdl.partition import Partition

__version__ = "0.1.0"

__all__ = ["CartesianPartition", "CommunicationError", "Partition"]
