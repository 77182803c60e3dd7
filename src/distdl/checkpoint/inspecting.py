"""What is in a checkpoint, for people."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distdl.checkpoint.files import Reader
from distdl.checkpoint.folders import INDEX, find
from distdl.checkpoint.index import MODEL, Index, from_text
from distdl.environment.progress import progress
from distdl.partition import dims


def inspect(path: str | os.PathLike[str], check: bool = False) -> str:
    """A text that tells what is in a checkpoint. For one process.

    Args:
        path: a checkpoint, or a folder of steps, of which the one saved last is told.
        check: whether the checksums of all blocks are compared, too.
    Raises: FileNotFoundError if there is no complete checkpoint; ValueError if it is damaged.
    """
    text, folder = find(Path(path).absolute())
    index = from_text(text, folder / INDEX)
    lines = [*_lines(index, folder)]
    if check:
        with Reader(folder, index) as reader:
            reader.check_sizes()
            for key, block in progress(list(index.written), "distdl inspect: blocks"):
                reader.check(key, block)
        lines.append("all checksums are right")
    return "\n".join(lines)


def _lines(index: Index, folder: Path) -> Iterator[str]:
    step = "no step" if index.step is None else f"step {index.step}"
    about = ", ".join(f"{name} {value}" for name, value in index.about.items())
    yield f"{folder}: {step}, saved by {index.workers} workers; {about}"
    rows = [
        ((key.removeprefix(MODEL), str(saved.dtype).removeprefix("torch."), dims(saved.extents) or "-"), saved)
        for key, saved in index.tensors.items()
        if key.startswith(MODEL)
    ]
    widths = [max([len(texts[column]) for texts, _ in rows], default=0) for column in range(3)]
    yield f"model: {len(rows)} tensors, {_size(sum(saved.nbytes for _, saved in rows))}"
    for (name, dtype, extents), saved in rows:
        files = sorted({block.worker for block in saved.blocks})
        blocks = f"{len(saved.blocks)} block{'s' if len(saved.blocks) != 1 else ''} of workers {files}"
        yield f"  {name:{widths[0]}}  {dtype:{widths[1]}}  {extents:>{widths[2]}}  {blocks}"
    for name, key in index.aliases.items():
        yield f"  {name.removeprefix(MODEL)} is {key.removeprefix(MODEL)}"
    kept = [saved for key, saved in index.tensors.items() if key.startswith("optimiser/")]
    if index.facts["optimiser"] is not None:
        yield f"optimiser: {index.facts['optimiser']['kind']}, {_size(sum(saved.nbytes for saved in kept))} of state"
        for number, group in enumerate(index.facts["optimiser"]["groups"]):
            yield f"  group {number}: {len(group['params'])} parameters, {_options(group['options'])}"
    if index.facts["scheduler"] is not None:
        yield f"scheduler: {_options(index.facts['scheduler'])}"
    if index.facts["random"] is not None:
        yield f"random: generators of {index.workers} workers, {len(index.facts['random']['layers'])} random layers"
    for path in index.facts["extra_state"]:
        yield f"extra state of {path or 'the model'}"


def _options(found: Any) -> str:
    pairs = found.get("dict", []) if isinstance(found, dict) else []
    return ", ".join(f"{key} {value}" for key, value in pairs if isinstance(value, (int, float, str)))


def _size(nbytes: int) -> str:
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"
