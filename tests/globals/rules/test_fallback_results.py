"""What a function gives that runs on one worker."""

import pytest
import torch

import distdl

doubles = torch.linspace(0, 1, 8, dtype=torch.float64).reshape(2, 4)


@pytest.mark.filterwarnings(
    "ignore:.*has no op for global tensors", "ignore:Sparse CSR", "ignore:The PyTorch API of nested"
)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.to_sparse(), lambda x: x.t().to_sparse_csr(),
        lambda x: torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 2])),
        lambda x: torch.nested.nested_tensor([x, x]), lambda x: torch.nested.as_nested_tensor([x, x]),
    ],
)  # fmt: skip
def test_results_of_which_no_worker_can_have_a_block(function):
    def work():
        x = distdl.distribute_tensor(doubles, distdl.world()[:2].reshape(1, 2))
        with pytest.raises(TypeError, match=r"no worker can have a block\. Make it of x\.full_tensor\(\)"):
            function(x)
        assert x.sum().item() == pytest.approx(4)

    function(doubles)  # (torch imports what nested tensors need in their first function, and not in threads at once)
    distdl.run_workers(work, 3)
