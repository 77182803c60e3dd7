"""The index of a checkpoint: its tensors, where the blocks of each lie, and all that is no tensor. A file of JSON."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch

from distdl.checkpoint.checking import check_facts, number
from distdl.checkpoint.records import Record
from distdl.geometry.boxes import Box, Shape, volume
from distdl.partition import dims
from distdl.tensors.dtypes import DTYPES
from distdl.transport.communicator import Communicator

FORMAT, VERSION = "distdl checkpoint", 1
MODEL = "model/"  # before the names of the model's tensors, in keys
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
_FOLDER = re.compile(r"data-[0-9a-f]{16}")


class Block(NamedTuple):
    """Some cells of a tensor, in a file.

    Attributes:
        worker: who has written it; the number of its file.
        box: which cells they are.
        checksum: CRC-32 of their bytes; -1 as long as they are not written.
    """

    worker: int
    box: Box
    checksum: int = -1


@dataclass(frozen=True)
class Saved:
    """One tensor of a checkpoint, in blocks that tile it."""

    dtype: torch.dtype
    extents: Shape
    blocks: tuple[Block, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.extents) * self.dtype.itemsize


@dataclass(frozen=True)
class Index:
    """What is in a checkpoint.

    Attributes:
        tensors: by key: of the model, ``model/NAME``; then what the optimiser and others keep.
        aliases: further names in the model, and the name of the same tensor.
        facts: ``optimiser``, ``scheduler``, ``scheduler_kind`` (the name of its class, where it is known) and
            ``random``, or None, and ``extra_state`` of modules.
        step: what the user said.
        workers: how many have written it.
        folder: where the files lie, beside the index.
        serial: how many were saved before in one folder of steps.
        sizes: bytes of each file, by worker.
        about: versions and the time, for people.
    """

    tensors: dict[str, Saved]
    aliases: dict[str, str]
    facts: dict[str, Any]
    step: int | None
    workers: int
    folder: str = ""
    serial: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def written(self) -> Iterator[tuple[str, Block]]:
        """All blocks, with the keys of their tensors."""
        for key, saved in self.tensors.items():
            for block in saved.blocks:
                yield key, block


def described(record: Record, comm: Communicator | None = None) -> list[Any]:
    """What a worker tells of a record: dtype, whole shape, its box, whether it may save it, a print to compare, and
    whether the first worker saves it.

    Args:
        comm: of the workers that are told, if there are any.
    """
    assert record.tensor is not None
    mark = _print(record.block) if record.equal and record.has_copies(comm) and record.tensor.numel() else None
    name = str(record.tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"a checkpoint keeps no tensors of {record.tensor.dtype}; {record.key} is one")
    return [name, list(record.extents), record.box, record.saves, mark, record.first]


def _print(block: torch.Tensor) -> int:
    """A number by which copies that differ by chance are told apart: the CRC of the cells in their order."""
    cells = block.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return zlib.crc32(cells.reshape(-1).view(torch.uint8).numpy().data)


def blocks_of(told: Sequence[dict[str, Any]]) -> dict[str, Saved]:
    """All tensors, and who writes which block: of the workers that have it, the one with the least to write so far; of
    a buffer that may differ the first, so that all buffers of a module are of one worker.

    Args:
        told: for each worker, what it has described, by key.
    Raises: ValueError that names both workers, if they differ in dtype or shape, or in the values of copies; or if
        blocks do not tile their tensor.
    """
    loads = [0] * len(told)
    found: dict[str, Saved] = {}
    for key in dict.fromkeys(key for one in told for key in one):
        having = [(worker, one[key]) for worker, one in enumerate(told) if key in one]
        first, (name, extents, *_) = having[0]
        for worker, (other, shape, *_) in having:
            if (other, shape) != (name, extents):
                raise ValueError(
                    f"{key} has to be the same tensor on every worker; it is {dims(extents)} {name} on worker {first} "
                    f"and {dims(shape)} {other} on worker {worker}"
                )
        holders: dict[Box, dict[int, int | None]] = {}
        first_saves = having[0][1][-1]
        for worker, (_, _, box, saves, mark, _) in having:
            if box is not None and saves and volume(_box(box)):
                holders.setdefault(_box(box), {})[worker] = mark
        blocks = []
        for box, marks in holders.items():
            least = min(marks, key=lambda worker: (0 if first_saves else loads[worker], worker))
            other = next((worker for worker in marks if marks[worker] != marks[min(marks)]), None)
            if other is not None:
                raise ValueError(
                    f"copies of {key} have to be equal; worker {min(marks)} and worker {other} have other values. If "
                    "these are meant to be different tensors, give their module parameter_layouts"
                )
            loads[least] += volume(box) * _DTYPES[name].itemsize
            blocks.append(Block(least, box))
        saved = Saved(_DTYPES[name], tuple(extents), tuple(sorted(blocks)))
        if _uncovered(saved):
            raise ValueError(f"the blocks of {key} do not tile its {dims(extents)}: {[one.box for one in blocks]}")
        found[key] = saved
    return found


def _box(box: Any) -> Box:
    return tuple((int(start), int(stop)) for start, stop in box)


def _uncovered(saved: Saved) -> bool:
    inside = all(
        len(block.box) == len(saved.extents)
        and all(0 <= start < stop <= n for (start, stop), n in zip(block.box, saved.extents, strict=True))
        for block in saved.blocks
    )
    return not inside or sum(volume(block.box) for block in saved.blocks) != prod(saved.extents)


# -- as a file


def to_text(index: Index) -> str:
    """The text of an index, with a checksum of it."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "step": index.step,
        "workers": index.workers,
        "folder": index.folder,
        "serial": index.serial,
        "about": index.about,
        "sizes": {str(worker): size for worker, size in sorted(index.sizes.items())},
        "aliases": index.aliases,
        **index.facts,
        "tensors": {
            key: {
                "dtype": str(saved.dtype).removeprefix("torch."),
                "shape": list(saved.extents),
                "blocks": [
                    {"file": block.worker, "box": [list(one) for one in block.box], "crc32": block.checksum}
                    for block in saved.blocks
                ],
            }
            for key, saved in index.tensors.items()
        },
    }
    return json.dumps({"crc32": _checksum(content), **content}, indent=1, allow_nan=False)


def from_text(text: str, where: object) -> Index:
    """The index of a text.

    Args:
        where: its file, for errors.
    Raises: ValueError if it is none, if it was altered, or if a later version of distdl has written it.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is damaged: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{where} is no index of a checkpoint of distdl")
    if content.get("version") != VERSION:
        raise ValueError(f"{where} is of version {content.get('version')} of the format; this distdl reads {VERSION}")
    try:
        checksum, own = content.pop("crc32", None), _checksum(content)
        if checksum != own:
            raise ValueError(f"its checksum is {checksum}, and that of its content {own}")
        return _read(content)
    except ValueError as error:
        raise ValueError(f"{where} is damaged: {error}") from error
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"{where} is damaged: {type(error).__name__}: {error}") from error


def _read(content: dict[str, Any]) -> Index:
    tensors = {}
    for key, one in content["tensors"].items():
        blocks = tuple(Block(number(b["file"]), _ranges(b["box"]), number(b["crc32"])) for b in one["blocks"])
        tensors[key] = saved = Saved(_DTYPES[one["dtype"]], tuple(map(number, one["shape"])), blocks)
        if _uncovered(saved):
            raise ValueError(f"the blocks of {key} do not tile it")
    if not _FOLDER.fullmatch(content["folder"]):  # so nothing outside of the checkpoint is read
        raise ValueError(f"{content['folder']!r} is no folder of files")
    sizes = {int(worker): number(size) for worker, size in content["sizes"].items()}
    without = {block.worker for saved in tensors.values() for block in saved.blocks} - sizes.keys()
    if without:
        raise ValueError(f"it has no size of the file of worker {min(without)}")
    aliases = dict(content["aliases"])
    unknown = sorted(set(aliases.values()) - tensors.keys())
    if unknown:
        raise ValueError(f"it has no {unknown[0]}")
    facts = {key: content[key] for key in ("optimiser", "scheduler", "random", "extra_state")}
    facts["scheduler_kind"] = content.get("scheduler_kind")  # absent in checkpoints of early versions
    check_facts(facts, tensors)
    return Index(
        tensors=tensors,
        aliases=aliases,
        facts=facts,
        step=None if content["step"] is None else number(content["step"]),
        workers=number(content["workers"], 1),
        folder=content["folder"],
        serial=number(content["serial"]),
        sizes=sizes,
        about=dict(content["about"]),
    )


def _ranges(found: Any) -> Box:
    return tuple((number(start), number(stop)) for start, stop in found)


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, allow_nan=False).encode())
