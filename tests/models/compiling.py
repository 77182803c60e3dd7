"""Some steps of training a model, compiled or as they are: the bits that each of them leaves."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from training import Split, batch_on, model_on
from zoo import Entry

import distdl

STEPS = 6  # the first as it is, two that are recorded, three replays

LINE = "line"
# What becomes of a model's step, with the loss that it is trained with: a line, or the reason why it stays as it is.
EXPECTED = {
    "monai-UNet-2d": LINE,
    "monai-BasicUNet-2d": LINE,
    "monai-SegResNet-2d": LINE,
    "monai-DynUNet-2d": LINE,
    "monai-UNETR-2d": LINE,
    "monai-SwinUNETR-2d": LINE,
    "monai-UNet-3d": LINE,
    "monai-BasicUNet-3d": LINE,
    "monai-SegResNet-3d": LINE,
    "monai-DynUNet-3d": LINE,
    "monai-UNETR-3d": LINE,
    "monai-SwinUNETR-3d": LINE,
    "timm-resnet": LINE,
    "timm-resnet-bottleneck": LINE,
    "timm-convnext": LINE,
    "timm-efficientnet": LINE,
    "timm-efficientnet-b0": LINE,
    "timm-mobilenetv3": LINE,
    "timm-densenet": LINE,
    "timm-vgg": LINE,
    "timm-regnet": LINE,
    "timm-vit": LINE,
    "timm-swin": LINE,
    "timm-mixer": LINE,
    "timm-sequencer": LINE,
    "timm-xcit": LINE,
    "smp-Unet": LINE,
    "smp-FPN": LINE,
    "smp-DeepLabV3Plus": LINE,
}


class Stepped(NamedTuple):
    """What this worker has after some steps.

    Attributes:
        left: for each step its bits by name: the loss, every gradient, and every weight and statistic afterwards.
        found: a line, or the reason why the step stays as it is.
    """

    left: list[dict[str, Tensor | None]]
    found: str


def stepped(entry: Entry, split: Split, module: nn.Module, compiled: bool = True, **options: Any) -> Stepped:
    """Take some steps of AdamW, each with another batch, on this world of workers.

    Args:
        module: the model, of which a copy is trained.
        compiled: whether :func:`distdl.compile` is around the step; else it is called as it is.
        options: of :func:`distdl.distribute`.
    """
    model = model_on(split, module, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(x: Any, target: Any) -> Any:
        loss = entry.loss(model(x), target)
        loss.backward()
        return loss

    run: Callable[..., Any] = distdl.compile(step) if compiled else step
    left = []
    for number in range(STEPS):
        x, target = batch_on(entry, split, number)
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "distdl.compile")  # whose text is found below
            loss = run(x, target)
        found = {"loss": _bits(loss)}
        found |= {f"gradient of {name}": _bits(one.grad) for name, one in model.named_parameters()}
        optimizer.step()
        found |= {name: _bits(one) for name, one in (*model.named_parameters(), *model.named_buffers())}
        left.append(found)
    return Stepped(left, _found(run) if compiled else "")


def _found(step: Any) -> str:
    reasons = [text for program in step.programs for text, _ in program.reasons]
    return ", ".join([LINE for program in step.programs if program.line is not None] + reasons)


def _bits(tensor: Any) -> Tensor | None:
    """A copy of a plain tensor, or of this worker's block of a global one."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, distdl.GlobalTensor) else tensor).clone()


def other_bits(ours: Stepped, theirs: Stepped) -> list[str]:
    """What a compiled training has left that is not what the same training as it is has left, a line each."""
    lines = []
    for number, (mine, others) in enumerate(zip(ours.left, theirs.left, strict=True)):
        lines += [f"step {number}: {name}, of one training alone" for name in mine.keys() ^ others.keys()]
        for name in mine.keys() & others.keys():
            one, other = mine[name], others[name]
            if not (one is other is None or (one is not None and other is not None and _same(one, other))):
                lines.append(f"step {number}: {name}")
    return lines


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
