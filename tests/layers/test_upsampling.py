import copy

import pytest
import torch
from helpers_layers import every_worker_raises, noise, on_workers, penalty
from properties_upsampling import Whole, both_corners
from torch.utils.checkpoint import checkpoint

import distdl
from distdl.geometry.boxes import balanced, runs
from distdl.nn import DistributedUpsample
from distdl.partition.layout import Layout
from distdl.testing import Counting, assert_adjoint, assert_matches_sequential

LINE = ("nearest", "nearest-exact", "linear")


def compare(P_x, x, blocks=None, **options):
    assert_matches_sequential(DistributedUpsample(P_x, **options), Whole(**options), x, blocks)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6])
def test_sizes_and_factors_in_one_dim(workers):
    def main(P):
        line, x = P.reshape(1, 1, workers), noise(2, 3, 11)
        for mode in LINE:
            for corners in both_corners(mode):
                for n in (1, 2, 5, 10, 11, 12, 17, 22, 37):
                    compare(line, x, size=(2, 3, n), mode=mode, align_corners=corners)
                for factor in (0.3, 0.5, 1.0, 1.5, 2, 2.5):
                    compare(line, x, scale_factor=factor, mode=mode, align_corners=corners)
                for factor in (1.05, 2.0000001, 3.0000001, 1.99999):  # see the adjoint of nearest, below
                    compare_forward(line, x, scale_factor=factor, mode=mode, align_corners=corners)

    on_workers(workers, main)


@pytest.mark.parametrize("sizes", [[1, 0, 9, 1], [0, 0, 0, 11], [11, 0, 0, 0], [5, 0, 0, 6]])
def test_uneven_and_empty_blocks(sizes):
    def main(P):
        blocks, line = [runs([2]), runs([3]), runs(sizes)], P.reshape(1, 1, 4)
        for mode in LINE:
            for corners in both_corners(mode):
                for n in (2, 6, 11, 23):
                    compare(line, noise(2, 3, 11), blocks, size=(2, 3, n), mode=mode, align_corners=corners)

    on_workers(4, main)


def test_images_and_volumes_split_in_any_dim():
    def main(P):
        x = noise(3, 3, 7, 10)
        for grid in ((2, 1, 1, 2), (1, 1, 2, 2), (1, 2, 2, 1), (1, 1, 4, 1)):
            for mode in ("nearest", "nearest-exact", "bilinear", "linear", "bicubic"):
                for corners in both_corners(mode):
                    compare(P[:4].reshape(*grid), x, size=(3, 3, 12, 9), mode=mode, align_corners=corners)
                    compare(P[:4].reshape(*grid), x, scale_factor=[1.5, 2.3], mode=mode, align_corners=corners)
        permuted = P.create_partition_inclusive([3, 1, 4, 0])
        for mode in ("nearest", "nearest-exact", "trilinear", "linear"):
            for corners in both_corners(mode):
                compare(permuted.reshape(1, 1, 2, 1, 2), noise(1, 2, 4, 5, 3), scale_factor=1.5, mode=mode,
                        align_corners=corners)  # fmt: skip

    on_workers(5, main)


def test_large_images_where_torch_takes_its_other_kernel():
    """Of nearest, height plus width 128 and 129 are computed differently if the factor is not the ratio of extents."""

    def main(P):
        grid = P.reshape(1, 1, 2, 2)
        for n in (30, 31, 32):
            for factor in (2.03, 1.02):
                compare_forward(grid, noise(1, 1, n, 32), scale_factor=factor, mode="nearest")

    on_workers(4, main)


def compare_forward(P_x, x, **options):
    layer, expected = DistributedUpsample(P_x, **options), Whole(**options)(x)
    y = layer(Layout.balanced(P_x, x.shape).block(x))
    piece = Layout.balanced(P_x, expected.shape).block(expected)
    assert torch.equal(y, piece) if "nearest" in options["mode"] else torch.allclose(y, piece, rtol=1e-13, atol=1e-13)


def test_precisions():
    def main(P):
        line = P.reshape(1, 1, 4)
        cells = slice(*balanced(13, 4)[P.rank])
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)):
            x = noise(2, 2, 13).to(dtype)
            for mode in LINE:
                expected = Whole(None, 1.7, mode)(x)
                y = DistributedUpsample(line, scale_factor=1.7, mode=mode)(x[..., cells])
                piece = expected[..., slice(*balanced(22, 4)[P.rank])]
                assert y.dtype == dtype and torch.allclose(y, piece, rtol=tolerance, atol=tolerance)
        x = torch.arange(26, dtype=torch.uint8).reshape(1, 2, 13)
        expected = Whole(None, 1.7, "nearest")(x)[..., slice(*balanced(22, 4)[P.rank])]
        assert torch.equal(DistributedUpsample(line, scale_factor=1.7, mode="nearest")(x[..., cells]), expected)

    on_workers(4, main)


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("factor", [2.0, 1.5, 0.5])
def test_channels_last_is_kept(mode, factor):
    x = noise(2, 3, 9, 10)
    whole = x.clone().requires_grad_()
    expected = torch.nn.Upsample(scale_factor=factor, mode=mode)(whole)
    dy = noise(*expected.shape, seed=1)
    expected.backward(dy)

    def main(P):
        P = P.reshape(1, 1, 2, 1)
        last = {"memory_format": torch.channels_last}
        layer = DistributedUpsample(P, scale_factor=factor, mode=mode)
        mine = Layout.balanced(P, x.shape).block(x).clone(**last).requires_grad_()
        y = layer(mine)
        owned = Layout.balanced(P, expected.shape)
        y.backward(owned.block(dy).clone(**last))
        assert torch.allclose(y, owned.block(expected), atol=1e-12)
        assert torch.allclose(mine.grad, Layout.balanced(P, x.shape).block(whole.grad), atol=1e-12)
        assert y.is_contiguous(**last) and mine.grad.is_contiguous(**last)

    on_workers(2, main)


def test_autocast_gives_what_it_gives_sequentially():
    def main(P):
        layer = DistributedUpsample(P.reshape(1, 1, 2), scale_factor=2)
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            x = torch.ones(1, 1, 3, dtype=dtype, requires_grad=True)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y, expected = layer(x), Whole(None, 2)(x)
            y.backward(torch.ones_like(y))
            assert y.dtype == expected.dtype and x.grad.dtype == dtype

    on_workers(2, main)


@pytest.mark.parametrize(("factor", "sizes"), [(2, (4, 0)), (1, (2, 2)), (1, (1, 0))])
def test_a_worker_outside_clones_and_an_empty_input_takes_the_dtype_of_the_others(factor, sizes):
    """With a movement; without one; without one and with an empty block."""

    def main(P):
        layer = DistributedUpsample(P[:2].reshape(1, 1, 2), scale_factor=factor).to("cpu").double()
        x = torch.ones(1, 1, sizes[P.rank]) if P.rank < 2 else torch.ones(1, 0)
        x = (x.double() if x.numel() else x).requires_grad_()
        y = layer(x)
        y.sum().backward()
        assert y is not x and (not y.numel() or y.data_ptr() != x.data_ptr())
        assert x.grad.shape == x.shape and x.grad.dtype == x.dtype
        assert y.dtype == (torch.float64 if P.rank < 2 else x.dtype)
        assert y.shape == ((1, 1, factor * sum(sizes) // 2 or 1 - P.rank) if P.rank < 2 else (1, 0))

    on_workers(3, main)


def test_requires_grad_may_differ_between_workers_and_calls():
    def main(P):
        layer = DistributedUpsample(P.reshape(1, 1, 3), scale_factor=1.5)
        for wanting in ({0}, {1, 2}, set(), {0, 1, 2}):
            x = torch.ones(1, 1, 3, requires_grad=P.rank in wanting)
            y = layer(x)
            if wanting:
                y.sum().backward()
            assert (x.grad is not None) == (P.rank in wanting)
        with torch.no_grad():
            assert not layer(x).requires_grad

    on_workers(3, main)


def test_double_backward_copies_containers_and_checkpoints():
    def main(P):
        line = P[:4].reshape(1, 1, 4)
        options = [{"scale_factor": 1.5}, {"size": (2, 1, 5), "mode": "nearest"}, {"size": (2, 1, 9), "mode": "linear"}]
        plain = torch.nn.Sequential(*[DistributedUpsample(line, **one) for one in options])
        whole = noise(2, 1, 7).requires_grad_()

        penalty(torch.nn.Sequential(*[Whole(**one) for one in options]), whole).backward()
        cells = slice(*(*runs([3, 0, 3, 1]), (0, 0))[P.rank])
        for network in (plain, copy.deepcopy(plain), lambda x: checkpoint(plain, x, use_reentrant=False)):
            x = whole.detach()[..., cells].clone() if P.rank < 4 else torch.zeros(2, 0).double()
            x.requires_grad_()
            penalty(network, x).backward()
            assert P.rank == 4 or torch.allclose(x.grad, whole.grad[..., cells], rtol=1e-10)

    on_workers(5, main)


def test_what_is_sent():
    def main(P):
        team = distdl.Partition(Counting(P.comm))

        def sent(mode, n, **options):
            layer = DistributedUpsample(team.reshape(1, 1, 4), mode=mode, **options)
            x = torch.ones(1, 2, n, requires_grad=True)
            layer(x)
            team.comm.reset()
            layer(x).sum().backward()
            return dict(team.comm.sent), [name for name, _ in team.comm.log]

        for factor in (2, 3):  # each cell feeds outputs of its own worker only: no message, no exchange
            assert sent("nearest", 4, scale_factor=factor) == ({}, ["all_max"])
        here, log = sent("linear", 4, scale_factor=2)
        assert log == ["all_max", "exchange", "exchange"]
        assert here == {rank: 2 for rank in (P.rank - 1, P.rank + 1) if 0 <= rank < 4}  # a halo and its gradient

    on_workers(4, main)


def test_it_is_adjoint_to_its_backward():
    def main(P):
        # of these, torch's own backward is not: it computes indices as for the ratio of the extents
        for mode, factor in (("nearest", 2.0000001), ("nearest", 2.3), ("nearest-exact", 23 / 14), ("linear", 1.05)):
            x = noise(2, 1, 4 - P.rank, seed=P.rank)
            assert_adjoint(DistributedUpsample(P.reshape(1, 1, 3), scale_factor=factor, mode=mode), x)

    on_workers(3, main)


REFUSED = [
    ({}, "exactly one of size and scale_factor; got None and None"),
    ({"size": (1, 1, 3), "scale_factor": 2}, "exactly one of size and scale_factor"),
    ({"scale_factor": 2, "mode": "bilinear"}, "has the modes nearest, nearest-exact, linear for 1 dims of space"),
    ({"scale_factor": 2, "mode": "area"}, "for 1 dims of space; got 'area'"),
    ({"scale_factor": 2, "mode": "nearest", "align_corners": True}, "align_corners with modes that weigh cells"),
    ({"scale_factor": 0.0}, "scale_factor to be one positive number, or 1 of them; got 0.0"),
    ({"scale_factor": (2, 2)}, "or 1 of them; got (2, 2)"),
    ({"scale_factor": "two"}, "or 1 of them; got 'two'"),
    ({"size": 7}, "the whole global shape of y, 3 whole numbers; got 7"),
    ({"size": (7,)}, "the whole global shape of y, 3 whole numbers; got (7,)"),
    ({"size": (1, 1, 2.5)}, "3 whole numbers"),
    ({"scale_factor": 2, "buffer_manager": 3}, "buffer_manager"),
    ({"size": (2, 1, 7)}, "a size with the batch and channels of x; got the size [2, 1, 7] and a global x of shape"),
    ({"size": (1, 1, 0)}, "at least one cell in each dim of space of x and y"),
    ({"scale_factor": 0.1}, "at least one cell in each dim of space of x and y; got a global x of shape [1, 1, 6]"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_bad_options_are_the_same_error_on_every_worker(options, words):
    assert words in every_worker_raises(
        2, lambda P: DistributedUpsample(P.reshape(1, 1, 2), **options)(torch.ones(1, 1, 3))
    )


@pytest.mark.parametrize(("x", "words"), [
    (lambda rank: torch.ones(1, 3), "3 dims on all workers"),
    (lambda rank: torch.ones(1, 1 + rank, 3), "must form a grid"),
    (lambda rank: torch.ones(1, 1, 3, dtype=torch.int32), "interpolates float64, float32, float16 and bfloat16"),
    (lambda rank: torch.ones(1, 1, 3, dtype=torch.uint8), "nearest cells of uint8; got torch.uint8"),
    (lambda rank: torch.ones(1, 1, 3, dtype=(torch.float32, torch.float64)[rank]), "tensors of one dtype"),
    (lambda rank: torch.ones(1, 1, 0), "a global x of shape [1, 1, 0]"),
])  # fmt: skip
def test_bad_input_is_the_same_error_on_every_worker(x, words):
    text = every_worker_raises(2, lambda P: DistributedUpsample(P.reshape(1, 1, 2), scale_factor=2)(x(P.rank)))
    assert words in text


def test_a_partition_without_space_is_refused():
    assert "1 to 3 dims of space; got 0" in every_worker_raises(
        2, lambda P: DistributedUpsample(P.reshape(1, 2), scale_factor=2)
    )
