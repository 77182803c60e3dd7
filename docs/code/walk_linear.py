"""One tensor through DistributedLinear: 7 features to 5, batch 3, six workers."""

import torch

import distdl
from distdl.nn import DistributedLinear
from distdl.partition.layout import Layout
from distdl.utilities.torch import zero_volume_tensor


def main():
    # [set-up]
    P = distdl.world()
    P_w = P.reshape(2, 3)
    P_x = P.create_partition_inclusive([1, 2, 3]).reshape(1, 3)
    P_y = P.create_partition_inclusive([4, 0]).reshape(1, 2)
    layer = DistributedLinear(P_x, P_y, P_w, in_features=7, out_features=5)

    # the numbers: W = 0, 1, .. 34 by rows, b = 0, 100, .. 400, X = 0, 1, .. 20 by rows
    W, b = torch.arange(35.0).reshape(5, 7), 100 * torch.arange(5.0)
    for (name, layout), whole in zip(layer.parameter_layouts.items(), (W, b), strict=True):
        layer.get_parameter(name).data = layout.block(whole).clone()
    X = torch.arange(21.0).reshape(3, 7)
    x = Layout.balanced(P_x, (3, 7)).block(X).clone() if P_x.active else zero_volume_tensor(3)

    # [forward]
    y = layer(x.requires_grad_())
    weight, bias = layer.sublinear.weight, layer.sublinear.bias
    shapes = [list(tensor.shape) for tensor in (x, weight, bias, y)]
    P.print_sequential(f"worker {P.rank}: x {shapes[0]}, weight {shapes[1]}, bias {shapes[2]}, y {shapes[3]}")
    #: worker 0: x [3, 0], weight [3, 3], bias [3], y [3, 2]
    #: worker 1: x [3, 3], weight [3, 2], bias [0], y [3, 0]
    #: worker 2: x [3, 2], weight [3, 2], bias [0], y [3, 0]
    #: worker 3: x [3, 2], weight [2, 3], bias [2], y [3, 0]
    #: worker 4: x [3, 0], weight [2, 2], bias [0], y [3, 3]
    #: worker 5: x [3, 0], weight [2, 2], bias [0], y [3, 0]
    if P_y.active:
        P_y.print_sequential(f"worker {P.rank}: {y.int().tolist()}")
    #: worker 4: [[91, 338, 585], [238, 828, 1418], [385, 1318, 2251]]
    #: worker 0: [[832, 1079], [2008, 2598], [3184, 4117]]
    assert torch.equal(y, Layout.balanced(P_y, (3, 5)).block(X @ W.T + b) if P_y.active else torch.empty(3, 0))

    # [backward]
    y.backward(torch.ones_like(y))
    if P_x.active:
        P_x.print_sequential(f"worker {P.rank}: {x.grad.int().tolist()[0]}")
    #: worker 1: [70, 75, 80]
    #: worker 2: [85, 90]
    #: worker 3: [95, 100]


if __name__ == "__main__":
    distdl.run_workers(main, workers=6)
