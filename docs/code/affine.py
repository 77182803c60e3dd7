"""Affine: a layer of your own. Each channel is scaled and shifted; the parameters are split as the channels are.

   a tensor over a 1x2x2 partition         its parameters, over P_x[:, :, :1]

                space                          space
             0         1                         0
         +---------+---------+             +---------+
       0 | worker 0| worker 1|           0 | worker 0|
channels +---------+---------+    channels +---------+
       1 | worker 2| worker 3|           1 | worker 2|
         +---------+---------+             +---------+
"""

import torch

import distdl
from distdl.nn import Broadcast, Module
from distdl.nn.placement import uniform_parameter
from distdl.partition import Layout, Partition


# [layer]
class DistributedAffine(Module):
    r"""Scale and shift each channel.

    Forward: :math:`y_c = \alpha_c x_c + \beta_c` for every channel c.
    Adjoint: :math:`\partial x_c = \alpha_c \, \partial y_c`; the gradients of :math:`\alpha_c` and :math:`\beta_c` are
    :math:`\langle x_c, \partial y_c \rangle` and the sum of :math:`\partial y_c`, over batch and space.

    Args:
        P_x: partition of input and output, ``batch x channels x space...``; any of them may be split.
        channels: global number of channels.
    Shapes: x local ``(batch, channels, space...)``, in elements, as many dims as P_x has axes; in channels as even a
        split as possible, longer blocks first, else any. y has that shape. Workers outside P_x return a tensor of zero
        volume.
    Attributes:
        scale, shift: this worker's blocks, ``(1, local channels, 1, ...)``; of zero volume where it stores none.
    """

    def __init__(self, P_x: Partition, channels: int) -> None:
        super().__init__()
        self.P_x = P_x
        ones = [1] * (P_x.workers.ndim - 2)
        stored = P_x[(slice(0, 1), slice(None), *[slice(0, 1)] * len(ones))]
        self._layout = Layout.balanced(stored, (1, channels, *ones))
        self._spread = Broadcast(stored, P_x, preserve_batch=False)
        self.scale = uniform_parameter(self._layout, bound=1.0)
        self.shift = uniform_parameter(self._layout, bound=1.0)

    @property
    def parameter_layouts(self) -> dict[str, Layout]:
        """Which block of each parameter lives where, in the order of the sequential layer's parameters."""
        return {"scale": self._layout, "shift": self._layout}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self._spread(self.scale)
        shift = self._spread(self.shift)
        return x * scale + shift


# [use]
def main():
    P = distdl.world().reshape(1, 2, 2)
    layer = DistributedAffine(P, channels=3)
    x = Layout.balanced(P, (5, 3, 4)).block(torch.ones(5, 3, 4))
    y = layer(x)
    y.sum().backward()
    shapes = f"x {list(x.shape)}, scale {list(layer.scale.shape)}, y {list(y.shape)}"
    P.print_sequential(f"worker {P.rank}: {shapes}, gradient of scale {layer.scale.grad.flatten().tolist()}")
    #: worker 0: x [5, 2, 2], scale [1, 2, 1], y [5, 2, 2], gradient of scale [20.0, 20.0]
    #: worker 1: x [5, 2, 2], scale [0], y [5, 2, 2], gradient of scale []
    #: worker 2: x [5, 1, 2], scale [1, 1, 1], y [5, 1, 2], gradient of scale [20.0]
    #: worker 3: x [5, 1, 2], scale [0], y [5, 1, 2], gradient of scale []


if __name__ == "__main__":
    distdl.run_workers(main)
