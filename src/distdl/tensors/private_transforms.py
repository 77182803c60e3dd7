"""Private names of torch's transforms and control flow. Only ``globals/extras`` imports them, at the first use."""

from __future__ import annotations

from typing import Any

from torch._functorch import eager_transforms, predispatch, vmap
from torch._higher_order_ops import utils
from torch._higher_order_ops.associative_scan import generic_associative_scan as torchs_associative_scan
from torch.utils import _pytree

# Nested structures of tensors.
tree_flatten = _pytree.tree_flatten
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_structure = _pytree.tree_structure
tree_unflatten = _pytree.tree_unflatten

# vmap: it wraps arguments and unwraps results. patches.py has replaced _flat_vmap before this file is imported.
vmap_impl = vmap.vmap_impl
flat_vmap_as_patched: Any = vmap._flat_vmap
unwrap_batched = vmap._unwrap_batched
maybe_remove_batch_dim: Any = vmap._maybe_remove_batch_dim
remove_batch_dim: Any = predispatch._remove_batch_dim

# Derivatives.
autograd_grad: Any = eager_transforms._autograd_grad
safe_unpack_dual = eager_transforms.safe_unpack_dual

# Control flow.
generic_associative_scan = torchs_associative_scan
stack_pytree = utils._stack_pytree
