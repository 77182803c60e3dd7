"""Boxes, and windows of convolution, pooling and interpolation: integers, and nothing else."""
