"""``.data`` of a plain tensor that is set to a global one: an error, and never the end of the process.

Run as a script, it prints what has come of each case: if torch took it, that process would end, and not the tests.
"""

import subprocess
import sys

import torch
from torch import nn

import distdl

REFUSED = "`variable` and `tensor` have incompatible tensor type"


class Kept(nn.Module):
    """A model that sets one of its tensors to a mean over samples."""

    def __init__(self, name):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3))
        self.name, self.how = name, "set"

    def forward(self, x):
        t = x.detach().mean(0)
        if self.how == "set":
            getattr(self, self.name).data = t
        else:
            getattr(self, self.name).data.copy_(t)
        return x * self.w + self.frozen + self.mean


def outcome(call):
    try:
        call()
    except RuntimeError as error:
        notes = getattr(error, "__notes__", ())
        return REFUSED in str(error), [note for note in notes if "self.b.data.copy_(t)" in note]
    return None, []


def cases():
    """For each case, whether it was refused, whether the error says what to write, and the values after that."""
    x = distdl.distribute_tensor(torch.arange(6.0).reshape(2, 3), distdl.world()[:2].reshape(2, 1))
    found = []
    for name, gradients in (("mean", True), ("frozen", True), ("frozen", False), ("w", False), ("w", True)):
        model = distdl.distribute(Kept(name), x.layout.partition)
        with torch.set_grad_enabled(gradients):
            refused, notes = outcome(lambda model=model: model(x))
            model.how = "copy"
            model(x)
        found.append((name, gradients, refused, len(notes), getattr(model, name).tolist()))
    model = distdl.distribute(Kept("w"), x.layout.partition)
    with torch.no_grad():
        for name, plain in (("outside", model.w), ("unknown", torch.zeros(3))):
            refused, notes = outcome(lambda plain=plain: setattr(plain, "data", x.mean(0)))
            found.append((name, False, refused, len(notes), plain.tolist()))
    model.w.grad = x.mean(0)  # (which an optimiser takes)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return [*found, ("grad", True, None, 0, model.w.tolist())]


MEAN, ZERO = [1.5, 2.5, 3.5], [0.0, 0.0, 0.0]
EXPECTED = [
    ("mean", True, True, 1, MEAN), ("frozen", True, True, 1, MEAN), ("frozen", False, True, 1, MEAN),
    ("w", False, True, 1, MEAN), ("w", True, None, 0, MEAN), ("outside", False, True, 0, ZERO),
    ("unknown", False, True, 0, ZERO), ("grad", True, None, 0, [-1.5, -2.5, -3.5]),
]  # fmt: skip


def test_the_data_of_a_plain_tensor_is_not_set_to_a_global_one():
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"{[EXPECTED] * 3}\n"), done.stderr


if __name__ == "__main__":
    print(distdl.run_workers(cases, 3, "threads"))
