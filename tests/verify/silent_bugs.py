"""Silent bugs of distributed programs: each is a small program that runs, looks right, and computes something else.

Each entry has the sequential program, the one with the bug, and the one without. All were met in programs that people
wrote by hand, or in reports on libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F

import distdl

Program = Callable[..., Mapping[str, torch.Tensor]]


class Bug(NamedTuple):
    """A wrong program.

    Attributes:
        name: what is wrong, in a few words.
        sequential: computes on whole tensors.
        candidate: takes ``wrong`` as a first argument: whether the bug is there.
        inputs: the shapes of the inputs, or the inputs themselves.
        named: which result differs first.
    """

    name: str
    sequential: Program
    candidate: Program
    inputs: tuple[torch.Tensor, ...]
    named: str


BUGS: list[Bug] = []


def bug(sequential: Program, named: str, *inputs: torch.Tensor) -> Callable[[Program], Program]:
    def add(candidate: Program) -> Program:
        BUGS.append(Bug(candidate.__name__, sequential, candidate, inputs, named))
        return candidate

    return add


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rows(length: int) -> tuple[int, int]:
    """The first row of this worker, and the one behind its last: 10 rows on 3 workers are 4, 3 and 3."""
    P = distdl.world()
    each, more = divmod(length, P.size)
    start = P.rank * each + min(P.rank, more)
    return start, start + each + (P.rank < more)


def own(whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """This worker's rows, as a leaf of autograd."""
    start, stop = rows(whole.shape[dim])
    block = whole.narrow(dim, start, stop - start).clone()
    return block.requires_grad_() if block.is_floating_point() else block


def together(block: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return torch.cat(distdl.world().allgather_data(block.detach()), dim)


def summed(value: torch.Tensor) -> torch.Tensor:
    return sum(distdl.world().allgather_data(value.detach()))


# -- gradients


def _linear(x, w):
    x, w = x.requires_grad_(), w.requires_grad_()
    loss = (x @ w).square().mean()
    loss.backward()
    return {"loss": loss, "gradient of x": x.grad, "gradient of w": w.grad}


@bug(_linear, "gradient of w", numbers(10, 4), numbers(4, 3, seed=1))
def the_gradient_of_a_replicated_weight_stays_local(wrong, x, w):
    block, w = own(x), w.requires_grad_()
    loss = (block @ w).square().sum() / (x.shape[0] * w.shape[1])
    loss.backward()
    gradient = w.grad if wrong else summed(w.grad)
    return {"loss": summed(loss), "gradient of x": together(block.grad), "gradient of w": gradient}


@bug(_linear, "gradient of w", numbers(10, 4), numbers(4, 3, seed=1))
def gradients_are_averaged_twice(wrong, x, w):
    block, w = own(x), w.requires_grad_()
    loss = (block @ w).square().sum() / (x.shape[0] * w.shape[1])  # the mean over the whole batch is in the loss
    loss.backward()
    gradient = summed(w.grad) / (distdl.world().size if wrong else 1)
    return {"loss": summed(loss), "gradient of x": together(block.grad), "gradient of w": gradient}


@bug(_linear, "loss", numbers(10, 4), numbers(4, 3, seed=1))
def the_mean_is_one_of_means_of_uneven_blocks(wrong, x, w):
    block, w = own(x), w.requires_grad_()
    share = 1 / distdl.world().size if wrong else block.shape[0] / x.shape[0]
    loss = (block @ w).square().mean() * share
    loss.backward()
    return {"loss": summed(loss), "gradient of x": together(block.grad), "gradient of w": summed(w.grad)}


@bug(_linear, "gradient of x", numbers(5, 4), numbers(4, 7, seed=1))
def the_backward_of_a_broadcast_does_not_add_up(wrong, x, w):
    x, columns = x.requires_grad_(), own(w, 1)  # each worker has some columns of w, and all of x
    loss = (x @ columns).square().sum() / (x.shape[0] * w.shape[1])
    loss.backward()
    gradient = x.grad if wrong else summed(x.grad)
    return {"loss": summed(loss), "gradient of x": gradient, "gradient of w": together(columns.grad, 1)}


def _accumulated(x, w):
    w = w.requires_grad_()
    for part in x:
        (part @ w).square().sum().backward()
    return {"gradient of w": w.grad}


@bug(_accumulated, "gradient of w", numbers(2, 10, 4), numbers(4, 3, seed=1))
def accumulated_gradients_are_summed_at_each_step(wrong, x, w):
    w = w.requires_grad_()
    for step, part in enumerate(x):
        (own(part) @ w).square().sum().backward()
        if wrong or step == len(x) - 1:
            w.grad = summed(w.grad)  # what was summed in the step before is summed again
    return {"gradient of w": w.grad}


def _clipped(gradient):
    return {"gradient": gradient * (1 / gradient.norm())}


@bug(_clipped, "gradient", numbers(10, 4))
def the_norm_that_clips_is_of_the_own_shard(wrong, gradient):
    block = own(gradient)
    square = block.square().sum()
    return {"gradient": together(block / (square if wrong else summed(square)).sqrt())}


# -- windows


def _convolution(x, w):
    return {"y": F.conv1d(x, w, padding=w.shape[-1] // 2)}


def around(x: torch.Tensor, width: int, reach: int) -> torch.Tensor:
    """This worker's cells and those around it; zeros outside, and where they are farther away than ``reach``."""
    start, stop = rows(x.shape[-1])
    padded = F.pad(x, (width, width))
    block = padded[..., start : stop + 2 * width].clone()
    block[..., : max(0, width - reach)] = 0
    block[..., block.shape[-1] - max(0, width - reach) :] = 0
    return block


@bug(_convolution, "y", numbers(1, 2, 8), numbers(2, 2, 9, seed=1))
def a_halo_ends_at_the_neighbour(wrong, x, w):
    shortest = x.shape[-1] // distdl.world().size
    return {"y": together(F.conv1d(around(x, 4, shortest if wrong else 4), w), 2)}


@bug(_convolution, "y", numbers(1, 2, 11), numbers(2, 2, 3, seed=1))
def each_block_is_padded_with_zeros(wrong, x, w):
    block = F.conv1d(own(x, 2), w, padding=1) if wrong else F.conv1d(around(x, 1, 1), w)
    return {"y": together(block, 2)}


def _strided(x, w):
    return {"y": F.conv1d(x, w, stride=2)}


@bug(_strided, "y", numbers(1, 2, 10), numbers(2, 2, 2, seed=1))
def strides_begin_anew_in_each_block(wrong, x, w):
    start, stop = rows(x.shape[-1])
    first = start if wrong else start + start % 2
    block = F.pad(x, (0, 1))[..., first : stop + 1 - (stop == x.shape[-1])]
    return {"y": together(F.conv1d(block, w, stride=2) if block.shape[-1] > 1 else block[..., :0], 2)}


def _upsampled(x):
    return {"y": F.interpolate(x, scale_factor=2, mode="linear", align_corners=False)}


@bug(_upsampled, "y", numbers(1, 2, 11))
def each_block_is_upsampled_alone(wrong, x):
    if wrong:
        return {"y": together(_upsampled(own(x, 2))["y"], 2)}
    start, stop = rows(x.shape[-1])
    first, last = max(start - 1, 0), min(stop + 1, x.shape[-1])
    wide = _upsampled(x[..., first:last])["y"]
    return {"y": together(wide[..., 2 * (start - first) : 2 * (stop - first)], 2)}


# -- statistics and sums along a split dim


def _batch_norm(x):
    mean, variance = torch.zeros(3, dtype=x.dtype), torch.ones(3, dtype=x.dtype)
    y = F.batch_norm(x, mean, variance, training=True)
    return {"y": y, "running mean": mean, "running variance": variance}


@bug(_batch_norm, "y", numbers(10, 3))
def batch_norm_takes_the_moments_of_the_own_samples(wrong, x):
    if wrong:
        found = _batch_norm(own(x))
        return {
            "y": together(found["y"]),
            "running mean": found["running mean"],
            "running variance": found["running variance"],
        }
    block, n = own(x), x.shape[0]
    mean = summed(block.sum(0)) / n
    variance = summed((block - mean).square().sum(0)) / n
    y = (block - mean) / (variance + 1e-5).sqrt()
    return {"y": together(y), "running mean": 0.1 * mean, "running variance": 0.9 + 0.1 * variance * n / (n - 1)}


@bug(_batch_norm, "running variance", numbers(10, 3))
def the_running_variance_is_biased(wrong, x):
    block, n = own(x), x.shape[0]
    mean = summed(block.sum(0)) / n
    variance = summed((block - mean).square().sum(0)) / n
    y = (block - mean) / (variance + 1e-5).sqrt()
    kept = variance if wrong else variance * n / (n - 1)
    return {"y": together(y), "running mean": 0.1 * mean, "running variance": 0.9 + 0.1 * kept}


def _layer_norm(x):
    return {"y": F.layer_norm(x, x.shape[-1:])}


@bug(_layer_norm, "y", numbers(4, 10))
def layer_norm_takes_the_own_features(wrong, x):
    block = own(x, 1)
    if wrong:
        return {"y": together(_layer_norm(block)["y"], 1)}
    mean = summed(block.sum(1, keepdim=True)) / x.shape[1]
    variance = summed((block - mean).square().sum(1, keepdim=True)) / x.shape[1]
    return {"y": together((block - mean) / (variance + 1e-5).sqrt(), 1)}


def _softmax(x):
    return {"y": x.softmax(1)}


@bug(_softmax, "y", numbers(4, 10))
def softmax_takes_the_own_classes(wrong, x):
    block = own(x, 1)
    if wrong:
        return {"y": together(block.softmax(1), 1)}
    exponentials = (block - x.amax(1, keepdim=True)).exp()
    return {"y": together(exponentials / summed(exponentials.sum(1, keepdim=True)), 1)}


def _running_sum(x):
    return {"y": x.cumsum(0)}


@bug(_running_sum, "y", numbers(10, 2))
def a_running_sum_begins_anew_in_each_block(wrong, x):
    before = x[: rows(x.shape[0])[0]].sum(0)
    return {"y": together(own(x).cumsum(0) + (0 if wrong else before))}


# -- places


def _largest(x):
    return {"index": x.argmax(0)}


@bug(_largest, "index", numbers(10, 6))
def an_index_counts_from_the_own_block(wrong, x):
    start, _ = rows(x.shape[0])
    block = own(x)
    found = distdl.world().allgather_data((block.amax(0).detach(), block.argmax(0) + (0 if wrong else start)))
    values, indices = torch.stack([value for value, _ in found]), torch.stack([index for _, index in found])
    return {"index": indices.gather(0, values.argmax(0, keepdim=True))[0]}


def _positions(x):
    return {"y": x + torch.arange(x.shape[0], dtype=x.dtype)[:, None]}


@bug(_positions, "y", numbers(10, 2))
def positions_begin_anew_in_each_block(wrong, x):
    start, stop = rows(x.shape[0])
    places = torch.arange(stop - start, dtype=x.dtype) + (0 if wrong else start)
    return {"y": together(own(x) + places[:, None])}


def _masked(x):
    mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(5)) < 0.5
    return {"y": x * mask}


@bug(_masked, "y", numbers(10, 4))
def every_worker_draws_the_same_mask_for_its_block(wrong, x):
    start, stop = rows(x.shape[0])
    shape = (stop - start, x.shape[1]) if wrong else x.shape
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.5
    return {"y": together(own(x) * (mask if wrong else mask[start:stop]))}


def _mask_of_weights(x, w):
    mask = torch.rand(w.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    return {"y": x @ (w * mask)}


@bug(_mask_of_weights, "y", numbers(10, 4), numbers(4, 3, seed=1))
def the_mask_of_a_replicated_tensor_depends_on_the_worker(wrong, x, w):
    seed = distdl.world().rank if wrong else 0
    mask = torch.rand(w.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    return {"y": together(own(x) @ (w * mask))}


def _entropy(logits, target):
    logits = logits.requires_grad_()
    loss = F.cross_entropy(logits, target)
    loss.backward()
    return {"loss": loss, "gradient of logits": logits.grad}


@bug(_entropy, "loss", numbers(10, 4), torch.arange(10) % 4)
def labels_are_split_at_other_rows_than_inputs(wrong, logits, target):
    P, block = distdl.world(), own(logits)
    start, stop = rows(10)
    if wrong and P.rank:  # blocks of floor(10 / 3) rows and the rest on the last worker: shifted by one at a border
        start, stop = start - 1, stop - 1
    loss = F.cross_entropy(block, target[start:stop], reduction="sum") / 10
    loss.backward()
    return {"loss": summed(loss), "gradient of logits": together(block.grad)}


@bug(_entropy, "loss", numbers(10, 4), torch.arange(10) % 4)
def rows_of_padding_are_counted_in_the_loss(wrong, logits, target):
    longest = -(-10 // distdl.world().size)
    start, stop = rows(10)
    more = longest - (stop - start)
    block = own(logits)
    padded = F.pad(block, (0, 0, 0, more))
    labels = F.pad(target[start:stop], (0, more), value=0 if wrong else -100)  # -100: not counted
    loss = F.cross_entropy(padded, labels, reduction="sum") / (longest * distdl.world().size if wrong else 10)
    loss.backward()
    return {"loss": summed(loss), "gradient of logits": together(block.grad)}


def _looked_up(table, index):
    return {"y": F.embedding(index, table)}


@bug(_looked_up, "y", numbers(10, 3), torch.tensor([0, 9, 4, 3, 7]))
def an_index_beyond_the_own_rows_reads_the_last_one(wrong, table, index):
    start, stop = rows(10)
    block = own(table)
    here = (index >= start) & (index < stop)
    read = F.embedding((index - start).clamp(0, len(block) - 1), block)
    if wrong:
        here = (index >= start) if distdl.world().rank else (index < stop)  # each but the first reads for those behind
    return {"y": summed(read * here[:, None])}
