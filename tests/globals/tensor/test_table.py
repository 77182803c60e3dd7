"""The table from functions of torch to what global tensors do."""

import pytest
import torch
from launched import on_workers, split
from same import noise

x35 = noise(3, 5)


@on_workers
def test_nothing_passes_by_the_table():
    x = split(x35)
    with (
        pytest.raises(RuntimeError, match="without passing through its table"),
        torch._C.DisableTorchFunctionSubclass(),
    ):
        x * 2
    for memory in (torch.Tensor.data_ptr, torch.Tensor.const_data_ptr, torch.Tensor.storage_type):
        with pytest.raises(TypeError, match="memory"):
            memory(x)
    with pytest.raises(RuntimeError, match="data pointer"):  # (it was a capsule, of which reading ended the process)
        torch.utils.dlpack.to_dlpack(x)
