"""Pooling and interpolation of global tensors."""

import pytest
import torch
from launched import on_workers, split
from same import Global, assert_raises_the_same, assert_same, noise
from torch.nn import functional as F

x3, x4, x5 = noise(2, 3, 11), noise(2, 3, 9, 7), noise(2, 3, 6, 5, 7)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.max_pool2d(x, 2), lambda x: F.max_pool2d(x, 3, 2, 1), lambda x: F.max_pool2d(x, 2, ceil_mode=True),
        lambda x: F.max_pool2d(x, (3, 2), (1, 2), dilation=(2, 1)),
        lambda x: F.max_pool2d(x, 2, return_indices=True)[1],
        lambda x: F.avg_pool2d(x, 3, 2, 1), lambda x: F.avg_pool2d(x, 2, 2, 0, True, False),
        lambda x: F.lp_pool2d(x**2, 2.0, 2),
        lambda x: F.adaptive_avg_pool2d(x, 1), lambda x: F.adaptive_avg_pool2d(x, (5, 3)),
        lambda x: F.adaptive_avg_pool2d(x, (None, 4)), lambda x: F.adaptive_max_pool2d(x, (4, 3)),
        lambda x: F.adaptive_max_pool2d(x, (4, 3), return_indices=True),
        lambda x: F.interpolate(x, scale_factor=2), lambda x: F.interpolate(x, size=(13, 5), mode="bilinear"),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True),
        lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic"),
        lambda x: F.interpolate(x, size=(4, 3), mode="area"),
        lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"),
    ],
)  # fmt: skip
def test_in_a_plane(function):
    assert_same(function, Global(x4))


@pytest.mark.parametrize(
    "function", [lambda x: F.max_pool1d(x, 3, 2), lambda x: F.avg_pool1d(x, 2), lambda x: F.adaptive_avg_pool1d(x, 4)]
)
def test_along_a_line(function):
    assert_same(function, Global(x3))


@pytest.mark.parametrize(
    "function",
    [lambda x: F.max_pool3d(x, 2), lambda x: F.adaptive_avg_pool3d(x, 2),
     lambda x: F.interpolate(x, scale_factor=2, mode="trilinear")],
)  # fmt: skip
def test_in_a_volume(function):
    assert_same(function, Global(x5))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "area"])
@pytest.mark.parametrize("x", [x3, x4, x5])
def test_no_samples(x, mode):
    assert_same(lambda x: F.interpolate(x, scale_factor=2, mode=mode), Global(x[:0]))


@pytest.mark.parametrize(
    "options",
    [{"size": (4, 3), "mode": "bilinear"}, {"scale_factor": (0.4, 1.7), "mode": "bicubic"},
     {"scale_factor": 0.6, "mode": "bilinear", "recompute_scale_factor": True}],
)  # fmt: skip
def test_filtered_images(options):
    assert_same(lambda x: F.interpolate(x, antialias=True, **options), Global(x4), falls_back=True)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_images_of_whole_numbers(mode):
    """Torch rounds them after each dim."""
    x = (noise(2, 3, 7, 5) * 60 + 120).clamp(0, 255).to(torch.uint8)
    for options in ({"size": (4, 9)}, {"scale_factor": 1.7, "align_corners": True}, {"size": 3, "antialias": True}):
        assert_same(lambda x, given=options: F.interpolate(x, mode=mode, **given), Global(x), falls_back=True)


@pytest.mark.filterwarnings("ignore:.*has no op")
@on_workers
def test_sizes_of_other_dims_are_refused():
    x = split(noise(2, 3, 7, 6))
    for options in ({"size": [3]}, {"size": (3, 9, 2)}, {"scale_factor": [0.5]}, {"size": (4, 4), "mode": "area"}):
        with pytest.raises(ValueError):
            F.interpolate(x, antialias=True, **{"mode": "bilinear", **options})


@pytest.mark.parametrize(
    ("x", "options"),
    [(x4, {"mode": "linear"}), (x5, {"mode": "linear"}), (x3, {"mode": "bilinear"}), (x4, {"mode": "trilinear"}),
     (x4, {"mode": "area", "align_corners": True}), (x4, {"mode": "nearest", "align_corners": False}),
     (x4, {"mode": "area", "scale_factor": (1, 2, 3)}), (x4, {"mode": "cubic"}), (x4, {"scale_factor": "2"}),
     (x4, {"scale_factor": "2", "mode": "bilinear"}), (x3, {"scale_factor": None, "size": 0, "mode": "linear"}),
     (x4, {"scale_factor": None, "size": (3, 0)}), (x4, {"scale_factor": None, "size": -1, "mode": "bicubic"}),
     (x4, {"scale_factor": 0.1}), (x4, {"scale_factor": (1, 0.1), "mode": "bilinear"}),
     (x4, {"scale_factor": 0.1, "mode": "bicubic", "recompute_scale_factor": True}),
     (x3, {"scale_factor": 0.0, "mode": "linear"}), (x5, {"scale_factor": (0.1, 2, 2), "mode": "trilinear"}),
     (x4, {"scale_factor": None, "size": (3, 3), "recompute_scale_factor": True}),
     (x4, {"scale_factor": None, "size": (3, 3), "recompute_scale_factor": True, "mode": "area"})],
)  # fmt: skip
def test_options_of_interpolation_that_torch_refuses(x, options):
    assert_raises_the_same(lambda x: F.interpolate(x, **{"scale_factor": 2, **options}), x, kinds=Exception)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("shape", [(2, 2, 5), (2, 2, 5, 4), (2, 2, 5, 4, 3)])
@pytest.mark.parametrize("kind", ["avg", "max"])
def test_second_derivatives_of_adaptive_pooling(kind, shape, count):
    """Linear as its gradients are in those of its result, these follow from x on all workers or on none."""
    pool = getattr(F, f"adaptive_{kind}_pool{len(shape) - 2}d")
    grids = [one + (1,) * (len(shape) - 3) for one in ((2, 1, 1), (1, 3, 1), (1, 1, 2))]
    assert_same(lambda x: pool(x, count), Global(noise(*shape)), grids=grids, twice=True)


POOLS = [getattr(F, f"{kind}{dims}d") for kind in ("adaptive_avg_pool", "adaptive_max_pool") for dims in (1, 2, 3)]
WINDOWS = [getattr(F, f"{kind}_pool{dims}d") for kind in ("max", "avg") for dims in (1, 2, 3)]


@pytest.mark.parametrize("pool", [*POOLS, *WINDOWS])
def test_pooling_of_other_dims_is_torchs_error(pool):
    assert_raises_the_same(lambda x: pool(x, 3), noise(2, 3, 4, 5, 6, 7), text=True)
    if not pool.__name__.endswith("1d"):
        assert_raises_the_same(lambda x: pool(x, 3), noise(2, 3), text=True)


def test_a_mean_of_all_of_space_looks_at_no_other_dim():
    assert_same(lambda x: F.adaptive_avg_pool2d(x, 1), Global(noise(2, 3, 4, 5, 6)))
    assert_same(lambda x: F.adaptive_avg_pool3d(x, (1, 1, 1)), Global(noise(2, 3, 2, 4, 5, 2)))


@pytest.mark.parametrize("pool", WINDOWS)
@pytest.mark.parametrize("options", [(2, 1, 2), (7, 1), (2, 0), (2, 1, -1)])
def test_windows_that_torch_refuses_are_its_errors(pool, options):
    x = noise(*(2, 3, 4, 5, 6)[: 2 + int(pool.__name__[-2])])
    assert_raises_the_same(lambda x: pool(x, *options), x, text=True)
