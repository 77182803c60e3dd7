"""Backward, users' autograd functions, and activation checkpoints."""
