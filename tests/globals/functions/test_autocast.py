"""Under autocast, functions give the dtypes and values of torch's, also those that we make of others."""

import re
from pathlib import Path

import pytest
import torch
from launched import on_workers, split
from same import Global, assert_raises_the_same, assert_same, noise
from torch.nn import functional as F

import distdl
from distdl.globals.functions import autocast
from distdl.globals.rules import applying
from distdl.globals.tensor.table import TABLE, name_of

HALVES = [torch.bfloat16, torch.float16]
square, image, volume = noise(4, 4), noise(2, 3, 5, 4), noise(2, 2, 4, 5, 3)
_CELLS = torch.arange(24).reshape(2, 3, 2, 2) % 20
CPU = {
    "trace": (torch.trace, square),
    "quantile": (lambda x: torch.quantile(x, 0.3), square),
    "quantile along a dim": (lambda x: torch.nanquantile(x, 0.3, 0), square),
    "prod": (lambda x: x.prod(0), square),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, (2, 3, 2)), volume),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, (2, 3, 2)), volume),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), volume),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), volume),
    "max_pool3d with places": (lambda x: F.max_pool3d(x, 2, return_indices=True)[0], volume),
    "reflection": (lambda x: F.pad(x, (1, 2, 2, 1), "reflect"), image),
    "reflection of a volume": (lambda x: F.pad(x, (1, 1, 1, 1, 1, 1), "reflect"), volume),
    "replication": (lambda x: F.pad(x, (1, 2, 2, 1), "replicate"), image),
    "a constant around": (lambda x: F.pad(x, (1, 2, 2, 1)), image),
    "max_unpool2d": (lambda x: F.max_unpool2d(x[:, :, :2, :2], _CELLS, 2, output_size=(5, 4)), image),
    "local_response_norm": (lambda x: F.local_response_norm(x, 3), image),
    "local_response_norm of lines": (lambda x: F.local_response_norm(x, 3), noise(2, 3, 5)),
    "view_as_complex": (lambda x: torch.view_as_complex(x).abs(), noise(3, 4, 2)),
    "cdist": (lambda x: torch.cdist(x, 2 * x), square),
    "cumsum": (lambda x: x.cumsum(0), square),
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), square),
}
GPU = {
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(0), 0),
    "cumprod": lambda x: x.cumprod(0),
    "cumsum": lambda x: x.cumsum(0),
    "dist": lambda x: torch.dist(x, x.flip(0)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "vector norm": lambda x: torch.linalg.vector_norm(x, 3, 0),
    "norm": lambda x: x.norm(),
    "normalize": lambda x: F.normalize(x, dim=0),
    "logsumexp": lambda x: x.logsumexp(0),
    "prod": lambda x: x.prod(0),
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
}
_OF_OTHERS = re.compile(  # whose dtype follows from torch's own on blocks, from an op, or from others of the list
    r"a(cos|sin)|(cos|sin)h|erfinv|exp(m1)?|log(10|1p|2)?|r(eciprocal|sqrt)|tan|pow|softplus|native_layer_norm"
    r"|frobenius_norm|nuclear_norm|linalg_vector_norm|_?upsample_.*|sum|(log_)?softmax|.*_loss2?d?|kl_div|.*_with_logits"
)


ALIKE = {  # of which the second is of float32
    "bilinear": lambda x, y: F.bilinear(x, x, y[None]),
    "cross": lambda x, y: torch.cross(x[:, :3], y[:, :3], dim=1),
    "dot": lambda x, y: x[0].dot(y[0]),
    "scatter_add": lambda x, y: x.scatter_add(0, torch.zeros(1, 4, dtype=torch.int64), y),
    "index_put": lambda x, y: x.index_put((torch.tensor([1]),), y[:1]),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CPU)
def test_dtypes_and_values_are_those_of_the_cpu(name, dtype):
    function, x = CPU[name]

    def cast(x):
        with torch.autocast("cpu", dtype):
            return function(x)

    assert_same(cast, Global(x.to(dtype)), tolerance=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", HALVES)
def test_an_empty_block_is_as_wide_as_the_others(dtype):
    def cast(x):
        with torch.autocast("cpu", dtype):
            return F.avg_pool3d(x, (4, 5, 6), (2, 3, 2), 2, ceil_mode=True)

    assert_same(
        cast, Global(noise(1, 1, 6, 5, 6).to(dtype)), grids=[(1, 2, 1, 1, 1)], tolerance=8 * torch.finfo(dtype).eps
    )


@pytest.mark.filterwarnings("ignore:.*has no op")
@pytest.mark.parametrize("dtype", HALVES)
def test_distances_of_rows_are_no_function_of_half_precision_on_a_cpu(dtype):
    def cast(x):
        with torch.autocast("cpu", dtype):
            return torch.pdist(x)

    assert_raises_the_same(cast, square.to(dtype))


@pytest.mark.parametrize("name", GPU)
def test_what_a_gpu_computes_in_float32_is_float32(name, monkeypatch):
    """With autocast of a CPU, of which the functions are told that it is a GPU."""
    monkeypatch.setattr(applying, "_kind", lambda x: "cuda")

    def work():
        x = distdl.distribute_tensor(square.bfloat16(), distdl.world()[:2].reshape(2, 1))
        with torch.autocast("cpu", torch.bfloat16):
            return GPU[name](x).dtype

    assert distdl.run_workers(work, 3) == [torch.float32] * 3


@pytest.mark.parametrize("name", ALIKE)
def test_what_a_gpu_computes_in_the_widest_dtype_is_of_that(name, monkeypatch):
    """The same; and of half precision alone, it stays so, as sums without nan do."""
    monkeypatch.setattr(applying, "_kind", lambda x: "cuda")

    def work():
        P = distdl.world()[:2].reshape(2, 1)
        x, y = (distdl.distribute_tensor(one, P) for one in (square.bfloat16(), square.float()))
        with torch.autocast("cpu", torch.bfloat16):
            assert x.nansum().dtype is x.nanmean(0).dtype is torch.bfloat16
            return ALIKE[name](x, y).dtype

    assert distdl.run_workers(work, 3) == [torch.float32] * 3


def test_every_function_of_a_gpus_list_is_known():
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    lists = re.split(r"#define AT_FORALL_", header.read_text())
    (wide,) = [one for one in lists if one.startswith("FP32(")]
    (chosen,) = [one for one in lists if one.startswith("FP32_SET_OPT_DTYPE(")]
    names = set(re.findall(r"\b_\((\w+)", wide + chosen)) - {"_"}
    assert len(names) > 50
    known = {*autocast._IN_FLOAT32["cuda"].split()}
    native = {
        name_of(function) for function in TABLE if callable(function)
    }  # (one worker computes the others by torch)
    assert not {name for name in native & names - known if not _OF_OTHERS.fullmatch(name)}


x35 = noise(3, 5)


class _Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        return x * self.factor


@on_workers
def test_autocast():
    model = distdl.distribute(torch.nn.Sequential(_Scale().float()), split(x35).layout.partition)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(noise(1, 5).float())
        loss = torch.nn.functional.relu(y).float().pow(2).mean()
    loss.backward()
    assert loss.dtype == torch.float32 and torch.isfinite(model[0].factor.grad).all()
