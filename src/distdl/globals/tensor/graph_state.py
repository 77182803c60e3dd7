"""What a global tensor tells autograd: whether it requires a gradient, and whether its block may be used.

The autograd graph is that of the blocks. The global tensor itself is a leaf in torch's eyes, with a flag of its own
that says whether it requires a gradient. :func:`note_requires` keeps the flag equal to that of the block, and
:func:`check_usable` finds out where the two have parted.
"""

from __future__ import annotations

from typing import Any

import torch

from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.table import METHODS
from distdl.tensors.connection import is_ordinary_view
from distdl.tensors.private_torch import DisableTorchFunctionSubclass, TensorBase

_raw_node = TensorBase.grad_fn.__get__
_raw_wants, _raw_requires = TensorBase.requires_grad.__get__, TensorBase.requires_grad.__set__


def is_leaf(x: GlobalTensor) -> bool:
    """Whether the block of a global tensor is a leaf; it counts as one where nothing is recorded.

    Without grad mode torch asks nobody, and would raise for a view of what requires a gradient, once that was written.
    """
    return not torch.is_grad_enabled() or x._block.is_leaf


def requires_grad(x: GlobalTensor) -> bool:
    """Whether a global tensor requires a gradient. A view that was made without grad mode does as its base does.

    Raises: RuntimeError; see :func:`check_usable`.
    """
    if is_leaf(x):
        check_usable(x)
    return x._block.requires_grad


def note_requires(x: GlobalTensor) -> None:
    """Let a global tensor say of itself whether its block requires a gradient, which may have changed in place.

    A number that ``number.lt_(x)`` has made boolean is left as it is: it has a graph, and torch lets no leaf of its
    dtype require a gradient.
    """
    wants = x._block.requires_grad
    with DisableTorchFunctionSubclass():
        if wants is not _raw_wants(x) and (not wants or x._block.is_floating_point() or x._block.is_complex()):
            _raw_requires(x, wants)


def settle_views(y: Any) -> None:
    """Detach the no-grad results of a function that torch would not call views, so that they may be written later.

    Torch refuses to write a view that was made without grad mode, but a block may be a view where the whole tensor is
    none, and then only some workers would refuse.

    Args:
        y: what the function has given: a global tensor, a tuple or list of such, or any other value.
    """
    if type(y) is GlobalTensor:
        if y._block._is_view() and not is_ordinary_view(y._block):
            if not y._views_of:
                y._block = y._block.detach()
            elif y._memory is not None:
                y._memory.has_plain_views = True
    elif isinstance(y, (tuple, list)):
        for one in y:
            settle_views(one)


def check_usable(x: GlobalTensor) -> None:
    """Check that a global tensor is what its block says.

    Raises: RuntimeError if it came out of an autograd function that knows nothing of blocks, or if it was written
        through another name.
    """
    with DisableTorchFunctionSubclass():
        node, wants = _raw_node(x), _raw_wants(x)
    if node is None and wants and not x._block.requires_grad:
        if x._views_of:  # a view made without grad mode, whose base requires no gradient any more
            note_requires(x)
        else:  # a tensor that autograd has saved and handed out again
            x._block = x._block.detach().requires_grad_()
    if node is not None:
        name = type(node).__name__.removesuffix("Backward")
        raise RuntimeError(
            f"the autograd function {name} was applied to a global tensor by a reference to {name}.apply that is older "
            "than the import of distdl; it computes on the whole tensor, but its gradient would be lost. Import distdl "
            "before the module that takes this reference"
        )
    for tie in x._ties:
        tie.check(x)
    if x._memory is not None and x._memory.family is not None:
        x._memory.check(x)


METHODS["requires_grad"] = requires_grad
