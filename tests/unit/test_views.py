"""Views: a region described once is the one that indexing finds, in any tensor of that layout."""

import pytest
import torch

from distdl.transport import View


def layouts(dtype):
    """Tensors of one shape, laid out in memory in different ways."""
    x = (torch.arange(2 * 3 * 4 * 5) % 251).reshape(2, 3, 4, 5).to(dtype)
    return {
        "contiguous": x,
        "behind others": torch.cat([x, x])[2:],
        "channels last": x.contiguous(memory_format=torch.channels_last),
        "permuted": x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        "apart": torch.zeros(5, 7, 9, 11, dtype=dtype)[1::2, 1::2, 1::2, 1::2].copy_(x),
        "expanded": x[0, 0, 1].expand(2, 3, 4, 5),
        "rows expanded": x[:, 1:2, 3:].expand(2, 3, 4, 5),
    }


LAYOUTS = list(layouts(torch.uint8))
INDICES = {
    "all": (),
    "a box": (slice(0, 2), slice(1, 3), slice(1, 2), slice(2, 5)),
    "one row": (slice(1, 2), slice(2, 3), slice(3, 4), slice(0, 5)),
    "one cell": (slice(1, 2), slice(0, 1), slice(3, 4), slice(4, 5)),
    "the last of the first dim": (slice(1, 2),),
    "nothing": (slice(0, 2), slice(2, 2), slice(0, 4), slice(0, 5)),
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.complex128])
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_view_is_what_indexing_finds(layout, index, dtype):
    tensor = layouts(dtype)[layout]
    laid = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
    view, expected = View.of(2, laid, INDICES[index]), tensor[INDICES[index]]
    found = view.take([torch.empty(0), torch.empty(0), tensor])
    assert torch.equal(found, expected) and found.stride() == expected.stride()
    assert (view.shape, view.strides, view.dtype) == (tuple(expected.shape), expected.stride(), dtype)
    assert view.nbytes == expected.numel() * dtype.itemsize and view.whole == (index == "all")
    if expected.numel():
        assert tensor.data_ptr() + view.offset == expected.data_ptr() == found.data_ptr()
        assert view.is_contiguous == expected.is_contiguous()


def test_a_view_of_a_tensor_that_begins_behind_others_is_counted_from_its_own_beginning():
    laid = torch.zeros(4, 6)[1:, 2:]
    view = View.of(0, laid, (slice(1, 3), slice(0, 2)))
    assert view.offset == 6 * 4 and view.strides == (6, 1)
    elsewhere = torch.arange(48.0).reshape(8, 6)[4:7, 1:5]
    assert torch.equal(view.take([elsewhere]), elsewhere[1:3, 0:2])
