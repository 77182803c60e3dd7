"""Tensors that are the same in every step, as the numbers of cells that a set-up has found."""

from __future__ import annotations

import torch

from distdl.tensors.modes import unobserved


class Constant:
    """A small tensor of the host, and a copy of it on each device on which it has been needed.

    To copy it anew in each step would have each step wait for the device.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        with torch.inference_mode(False):  # it serves calls that record gradients, too
            self.tensor = tensor.clone() if tensor.is_inference() else tensor
        self._copies: dict[torch.device, torch.Tensor] = {tensor.device: self.tensor}

    def on(self, device: torch.device) -> torch.Tensor:
        """The tensor on a device."""
        found = self._copies.get(device)
        if found is None:
            with torch.inference_mode(False), unobserved():
                found = self._copies[device] = self.tensor.to(device)
        return found
