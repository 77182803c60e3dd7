"""The published helpers that need no workers: slices, blocks, dtypes."""

import numpy as np
import pytest
import torch

from distdl.geometry.boxes import balanced
from distdl.utilities.dtype import (
    intID_to_numpy_dtype_dict,
    intID_to_torch_dtype_dict,
    numpy_to_intID_dtype_dict,
    numpy_to_torch_dtype_dict,
    torch_to_intID_dtype_dict,
    torch_to_numpy_dtype_dict,
)
from distdl.utilities.index_tricks import cartesian_index_c, cartesian_index_f
from distdl.utilities.slicing import (
    assemble_index_filter,
    assemble_slices,
    compute_intersection,
    compute_nd_slice_shape,
    compute_nd_slice_volume,
    compute_partition_intersection,
    compute_start_index,
    compute_stop_index,
    compute_subshape,
    filtered_range_index,
    range_index,
    worker_layout,
)
from distdl.utilities.tensor_decomposition import (
    compute_subtensor_intersection_slice,
    compute_subtensor_shapes_balanced,
    compute_subtensor_start_indices,
    compute_subtensor_stop_indices,
)
from distdl.utilities.torch import TensorStructure, zero_volume_tensor


def test_compute_subshape():
    assert compute_subshape([2, 3], [1, 0], [5, 7]).tolist() == [2, 3]
    assert compute_subshape(np.array([3]), (1,), [7]).tolist() == [2]
    assert compute_subshape(3, 0, 7) == 3 and isinstance(compute_subshape([1], [0], [4])[0], np.integer)
    for shape in ([5], [5, 6, 7], []):
        with pytest.raises(ValueError, match=r"broadcast"):
            compute_subshape([2, 3], [1, 0], shape)


def test_blocks_and_their_intersections():
    for parts, extent in ((3, 7), (4, 2), (1, 5)):
        for place, (start, stop) in enumerate(balanced(extent, parts)):
            assert compute_start_index([parts], [place], [extent]).tolist() == [start]
            assert compute_stop_index(parts, place, extent) == stop
    start, stop, shape = compute_intersection([0, 4], [3, 8], [2, 0], [5, 6])
    assert (start.tolist(), stop.tolist(), shape.tolist()) == ([2, 4], [3, 6], [1, 2])
    assert compute_intersection(0, 2, 5, 9)[2].tolist() == [0]
    # 7 columns: 3, 2, 2 here and 4, 3 there
    assert compute_partition_intersection([1, 3], [0, 1], [1, 2], [0, 0], [4, 7]) == (slice(0, 4, 1), slice(0, 1, 1))
    assert compute_partition_intersection([1, 2], [0, 0], [1, 3], [0, 1], [4, 7]) == (slice(0, 4, 1), slice(3, 4, 1))
    assert compute_partition_intersection([1, 3], [0, 2], [1, 2], [0, 0], [4, 7]) is None


def test_slices():
    cut = assemble_slices([1, 0], np.array([3, 2]))
    assert cut == (slice(1, 3, 1), slice(0, 2, 1)) and np.zeros((5, 5))[cut].shape == (2, 2)
    assert compute_nd_slice_shape(cut) == (2, 2) and compute_nd_slice_volume(cut) == 4


def test_indices_and_filters():
    assert list(range_index((2, 2))) == [(0, 0), (0, 1), (1, 0), (1, 1)] == list(range_index(np.array([2, 2])))
    assert worker_layout([2, 3]).tolist() == [[0, 1, 2], [3, 4, 5]]
    row, column = assemble_index_filter((1, 2), [0]), assemble_index_filter(np.array([1, 2]), 0, invert=True)
    assert list(filtered_range_index([2, 3], row)) == [(1, 0), (1, 1), (1, 2)]
    assert list(filtered_range_index([2, 3], column)) == [(0, 2), (1, 2)]
    assert worker_layout([2, 3])[column].ravel().tolist() == [2, 5]
    assert list(filtered_range_index((2, 3), (1, slice(None, None, 2)))) == [(1, 0), (1, 2)]
    assert cartesian_index_c([2, 3], 1).tolist() == [0, 1] and cartesian_index_f([2, 3], 1).tolist() == [1, 0]


def test_tensor_structure():
    structure = TensorStructure(torch.zeros(2, 3, dtype=torch.float64, requires_grad=True))
    assert (tuple(structure.shape), structure.dtype, structure.requires_grad) == ((2, 3), torch.float64, True)
    other = TensorStructure()
    assert other.shape is None and other != structure
    other.fill_from_tensor(torch.ones(2, 3, dtype=torch.float64, requires_grad=True))
    assert other == structure and "float64" in repr(other)


def test_tensor_decomposition():
    shapes = compute_subtensor_shapes_balanced(TensorStructure(torch.zeros(3, 7)), [2, 3])
    assert shapes[..., 0].tolist() == [[2, 2, 2], [1, 1, 1]] and shapes[..., 1].tolist() == [[3, 2, 2]] * 2
    assert compute_subtensor_start_indices(shapes)[1, 2].tolist() == [2, 5]
    assert compute_subtensor_stop_indices(shapes)[0, 1].tolist() == [2, 5]
    assert compute_subtensor_intersection_slice([2, 0], [5, 4], [4, 1], [9, 2]) == (slice(2, 3, 1), slice(1, 2, 1))
    assert compute_subtensor_intersection_slice([2, 0], [5, 4], [5, 1], [9, 2]) is None


def test_tables_of_dtypes():
    for dtype in (torch.float32, torch.float64, torch.int32, torch.bool, torch.complex64, torch.uint8):
        scalar = torch_to_numpy_dtype_dict[dtype]
        assert torch.from_numpy(np.zeros(1, dtype=scalar)).dtype == dtype == numpy_to_torch_dtype_dict[scalar]
        code = torch_to_intID_dtype_dict[dtype]
        assert code == numpy_to_intID_dtype_dict[scalar]
        assert intID_to_torch_dtype_dict[code] == dtype and intID_to_numpy_dtype_dict[code] is scalar
    assert torch_to_numpy_dtype_dict[torch.float32] is np.float32


def test_zero_volume_tensor():
    assert zero_volume_tensor().shape == (0,) and zero_volume_tensor(np.int64(4)).shape == (4, 0)
    assert zero_volume_tensor().dtype == torch.get_default_dtype()
    x = zero_volume_tensor(2, dtype=torch.float64, requires_grad=True, device="cpu")
    assert x.dtype == torch.float64 and x.requires_grad
    zero_volume_tensor().requires_grad = True
