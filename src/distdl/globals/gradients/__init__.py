"""Backward, autograd functions of users, and checkpoints."""
