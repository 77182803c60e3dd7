"""Private names of torch, each bound to a name of ours: what another version of torch may rename stands in one place.

All of them are there in torch 2.13. Those of transforms and of flex attention have files of their own, because few
programs import them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn import functional
from torch.optim import optimizer
from torch.utils import _foreach_utils, _python_dispatch
from torch.utils import checkpoint as checkpoints

# The class below torch.Tensor, whose attributes ask no __torch_function__, and tensors that have no memory.
TensorBase: Any = torch._C.TensorBase
make_wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass
throw_on_mutable_data_ptr: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr

# Contexts in which torch calls no __torch_function__: of no mode and no subclass, or of no subclass.
DisableTorchFunction = torch._C.DisableTorchFunction
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass

# Whether torch calls __torch_function__, how many modes of both kinds are on, and a context without dispatch modes.
is_torch_function_enabled = torch._C._is_torch_function_enabled
len_torch_function_stack = torch._C._len_torch_function_stack
len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
disable_current_modes = _python_dispatch._disable_current_modes

# Whether something is on now: autocast, a transform of torch.func, torch.jit.trace, a profiler.
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
are_functorch_transforms_active = torch._C._are_functorch_transforms_active
get_tracing_state = torch._C._get_tracing_state
profiler_enabled = torch._C._autograd._profiler_enabled

# The backward that is under way: its number (-1 outside of a backward), the node that runs, and a call at its end.
current_graph_task_id = torch._C._current_graph_task_id
current_autograd_node = torch._C._current_autograd_node
queue_callback: Any = torch.autograd.Variable._execution_engine.queue_callback

# What a checkpoint raises inside of its forward when it has recomputed enough.
StopRecomputationError = checkpoints._StopRecomputationError

# Autograd functions of users: which of its two backwards one has, and the node of one that is differentiable once.
get_user_fn: Any = BackwardCFunction._get_user_fn
DelayedError: Any = torch._C._functions.DelayedError

# The memory of tensors.
storage_use_count = torch._C._storage_Use_Count
has_storage = torch._C._has_storage

# The types of operators, as torch.ops.aten.add.Tensor and torch.ops.aten.add.
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket

# Compiled functions that torch's functions in Python call. Handlers for them stand in the table.
nn_functions: Any = torch._C._nn
variable_functions: Any = torch._C._VariableFunctions
parse_to_arguments = torch._C._nn._parse_to

# Types of tensors for which optimizers and the clipping of gradients call functions of lists.
optimizer_foreach_types: Any = optimizer._foreach_supported_types
clipping_foreach_types: Any = _foreach_utils._foreach_supported_types

# What torch makes of arguments: the deprecated ones of losses, and output_size of max_unpool.
legacy_get_string = torch.nn._reduction.legacy_get_string
unpool_output_size: Any = getattr(functional, "_unpool_output_size")  # noqa: B009  # torch does not export it
