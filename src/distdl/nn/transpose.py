"""The published name of :class:`~distdl.nn.repartition.Repartition`."""

from distdl.nn.repartition import Repartition

DistributedTranspose = Repartition
