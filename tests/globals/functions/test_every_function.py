"""Whatever torch computes of one matrix or of two, by positions alone: global tensors give the same, or an error.

So what a newer torch brings is tried as soon as it is there, and cannot be taken for another function of its name.
"""

import re
import warnings

import torch
from same import noise
from torch.nn import functional

import distdl
from distdl import GlobalTensor

_SPACES = (torch, torch.Tensor, functional, torch.special, torch.linalg, torch.fft)
_MATRICES = noise(4, 4) @ noise(4, 4).mT + torch.eye(4, dtype=torch.float64), noise(4, 4, seed=2)
# random numbers, which are those of a stream of distdl, memory without values, and torch's own questions
_DIFFERENT = re.compile(
    r"((rand|randn|empty)_like|binomial|poisson|normal|gumbel_softmax|dropout[123]?d?|(svd|pca)_lowrank|lobpcg"
    r"|(bernoulli|cauchy|exponential|log_normal|normal|random|uniform)_|has_torch_function.*)"
)
# what has another form of tensors or of memory
_REFUSED = re.compile(
    r"((from|to)_dlpack|(const_)?data_ptr|(untyped_)?storage(_type)?|to_sparse.*|sparse_coo_tensor|set_|module_load)"
)
# switches of the process, of threads or devices, and files
_LEFT_OUT = re.compile(
    r"(_.*|set_(?!$).*|seed|manual_seed|initial_seed|use_deterministic_algorithms|compile|save|load|from_file"
    r"|share_memory_|is_shared|to_mkldnn|cuda|xpu|ipu|hpu|mtia|import_ir_module.*|.*vital.*|backward)"
)


def _flat(result):
    if isinstance(result, (tuple, list)):
        return [one for part in result for one in _flat(part)]
    return [result.full_tensor() if type(result) is GlobalTensor else result]


def _is_same(ours, theirs):
    if not isinstance(theirs, torch.Tensor):
        return not isinstance(theirs, (bool, int, float)) or ours == theirs
    return (
        isinstance(ours, torch.Tensor)
        and (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        and torch.allclose(ours, theirs, atol=1e-9, equal_nan=True)
    )


def _calls():
    """Functions, by name, the number of matrices that each is given, and what torch makes of them."""
    for space in _SPACES:
        for name in dir(space):
            function = getattr(space, name)
            if _LEFT_OUT.fullmatch(name) or not callable(function) or isinstance(function, type):
                continue
            for count in (1, 2):
                try:
                    yield name, function, count, _flat(function(*(one.clone() for one in _MATRICES[:count])))
                except Exception:  # (torch's errors are of other tests)
                    continue


def test_every_function_of_matrices():
    def work():
        P, wrong = distdl.world().reshape(2, 2), []
        for name, function, count, theirs in calls:
            try:
                ours = _flat(function(*(distdl.distribute_tensor(one.clone(), P) for one in _MATRICES[:count])))
            except (TypeError, RuntimeError) as error:
                if not _REFUSED.fullmatch(name):
                    wrong.append((name, count, str(error)))
                continue
            same = len(ours) == len(theirs) and all(map(_is_same, ours, theirs))
            if not same and not _DIFFERENT.fullmatch(name):
                wrong.append((name, count, ours, theirs))
        return wrong

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls = list(_calls())
        found = distdl.run_workers(work, 4)
    assert len(calls) > 800
    assert not any(found), found[0]
