"""Batches of samples as global tensors, of which each worker reads only its own block from files.

>>> dataset = distdl.data.BlockDataset(("images.npy", "masks.h5:masks"), P)
>>> for image, mask in distdl.data.DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2):
...     loss = F.cross_entropy(model(image), mask)
"""

from distdl.data.blocks import BlockDataset, Blocks
from distdl.data.loading import DataLoader, collate

__all__ = ["BlockDataset", "Blocks", "DataLoader", "collate"]
