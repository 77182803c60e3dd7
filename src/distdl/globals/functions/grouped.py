"""Products of groups of rows with matrices, as mixtures of experts compute them."""

from __future__ import annotations

from typing import Any

import torch

from distdl.globals.layouts.spreading import pencils
from distdl.globals.moving.alignment import block_in, gather_global
from distdl.globals.tensor.entering import entered
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.replicas import plain_of
from distdl.globals.tensor.table import by_name, handles
from distdl.tensors.connection import saving, zeros_on


@handles("_grouped_mm grouped_mm", "torch functional")
@by_name
def grouped_product(func: Any, input: Any, mat2: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Multiply each row by the matrix of its group. Rows stay on their workers, and the matrices are plain.

    Other forms, in which the summed dim is split in groups, fall back.

    Args:
        mat2: a matrix for each group.
        offs: where each group ends, of the rows, which are sorted by group. Gathered on every worker.
    """
    whole = offs is not None and type(input) is GlobalTensor and type(mat2) is not GlobalTensor and bias is None
    if not whole or (input.dim(), mat2.dim()) != (2, 3):
        return NotImplemented
    layout = pencils(input._layout, [1])
    rows, context = layout.intervals[0], layout.context

    def check() -> bool:  # on meta tensors, torch refuses all dtypes but bfloat16
        few = (torch.zeros(one.shape, dtype=one.dtype, device=input.device) for one in (input[:0], mat2, offs))
        func(next(few), next(few), offs=next(few), out_dtype=out_dtype)
        return True

    shapes = [(one.shape, one.dtype) for one in (input, mat2, offs)]
    context.keep((func, *shapes, out_dtype), check)
    target = context.layout(layout.partition.workers, [rows, ((0, mat2.shape[2]),)])
    block, weight = block_in(input, layout, "grouped_mm"), entered(mat2, context)
    ends = plain_of(gather_global(offs))
    if 0 in target.local:
        y = saving(zeros_on(block, target.local) + zeros_on(weight, ()))
        return GlobalTensor._of(y if out_dtype is None else y.to(out_dtype), target)
    start, stop = layout.box[0]
    mine = (ends - start).clamp(0, stop - start).to(ends.dtype)
    y = func(block.contiguous(), weight, offs=mine, out_dtype=out_dtype)
    if y.requires_grad:  # torch refuses a gradient whose rows do not begin at multiples of 16 bytes
        y.register_hook(torch.Tensor.contiguous)
    return GlobalTensor._of(y, target)
