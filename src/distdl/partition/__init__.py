"""Partitions of workers, and the layouts of tensors over them."""

from distdl.partition.groups import dims
from distdl.partition.layout import Layout
from distdl.partition.layout import Lookup as Lookup
from distdl.partition.partition import CartesianPartition, Partition
from distdl.partition.signature import Signature

__all__ = ["CartesianPartition", "Layout", "Partition", "Signature", "dims"]
