"""Converting: between our checkpoints and directories of torch.distributed.checkpoint. For one process."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from distdl.checkpoint import optimisers
from distdl.checkpoint.exporting import States, plain_states
from distdl.checkpoint.files import Reader, name_of, on_disk, safetensors, write_blocks
from distdl.checkpoint.folders import INDEX, Place, find
from distdl.checkpoint.index import MODEL, Index, blocks_of, described, from_text
from distdl.checkpoint.records import Record
from distdl.checkpoint.values import decode, encode
from distdl.environment.progress import progress
from distdl.geometry.boxes import whole

_OPTIMISERS = ("optimizer", "optim", "optimiser")


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    model: str | None = None,
    optimiser: str | None = None,
) -> str:
    """Write one of our checkpoints as a directory of torch.distributed.checkpoint, or the other way. For one process.

    Its memory has to hold all tensors. Numbers are the same to the last bit. Such a directory gets the dicts ``model``
    and, if they are there, ``optimizer`` (by names, as ``torch.distributed.checkpoint.state_dict`` has it),
    ``scheduler`` and ``step``; states of random generators are left out.

    Args:
        source: what there is: a directory with ``.metadata``, or a checkpoint of ours (of a folder of steps, the last).
        target: a folder that is not there, or empty.
        model, optimiser: where their dicts are in a directory of torch, with dots (``app.model``). By default the model
            is ``model``, or all of it, and the optimiser ``optimizer``, ``optim`` or ``optimiser``, if there is one.
    Returns: a text that tells what was written, and what was left out.
    Raises: FileNotFoundError if there is no checkpoint; ValueError if it is damaged, or has something in it that cannot
        be kept, or if the target is not empty; ImportError without the package safetensors.
    """
    from distdl.checkpoint import dcp  # here, for it takes a second

    source, target = Path(source).absolute(), Path(target).absolute()
    safetensors()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"a conversion needs a new or empty folder; {target} is not")
    if not (source / dcp.METADATA).is_file():
        if model is not None or optimiser is not None:
            raise ValueError(f"where the model is can be said of directories with {dcp.METADATA}; {source} is none")
        state, left = _ours(source)
        dcp.write(target, state)
        return _told(target, list(state), left)
    state = dcp.read(source)
    taken, left = _parts(state, model, optimiser)
    _write(target, taken)
    return _told(target, [name for name, one in taken.items() if one is not None], left)


def _told(target: Path, parts: list[str], left: list[str]) -> str:
    return f"{target}: {', '.join(parts)}" + (f"; left out: {', '.join(left)}" if left else "")


# -- from ours


def _ours(source: Path) -> tuple[dict[str, Any], list[str]]:
    """A checkpoint of ours as nested dicts, and what is left out."""
    text, folder = find(source)
    index = from_text(text, folder / INDEX)
    with Reader(folder, index) as reader:
        reader.check_sizes()
        for key, block in progress(list(index.written), "distdl convert: blocks"):
            reader.check(key, block)
        kept = {key: saved for key, saved in index.tensors.items() if not key.startswith("random/")}
        found = {key: reader.read(key, whole(saved.extents)) for key, saved in kept.items()}
    model, numbered = plain_states(index, found)
    state: dict[str, Any] = {"model": model}
    left = [] if index.facts["random"] is None else ["random numbers"]
    if numbered is not None:
        left += [f"{key} of the optimiser" for key in _further(numbered)]
        state["optimizer"] = _by_names(numbered, [group["params"] for group in index.facts["optimiser"]["groups"]])
    if index.facts["scheduler"] is not None:
        state["scheduler"] = decode(index.facts["scheduler"], found.__getitem__)
    if index.step is not None:
        state["step"] = index.step
    return state, left


def _further(found: dict[str, Any]) -> list[str]:
    """What a state_dict of an optimiser has that such directories do not: what is of no parameter."""
    further = optimisers.besides(found)
    return [*map(str, further.pop("state", {})), *further]


def _by_names(numbered: dict[str, Any], keys: list[list[str]]) -> dict[str, Any]:
    names = [key.removeprefix(MODEL) for own in keys for key in own]
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in numbered["param_groups"]]
    state = {names[number]: numbered["state"][number] for number in range(len(names)) if number in numbered["state"]}
    return {"state": state, "param_groups": groups}


# -- from torch's


def _parts(state: dict[str, Any], model: str | None, optimiser: str | None) -> tuple[dict[str, Any], list[str]]:
    """What a checkpoint of ours has, by its kinds (None where there is nothing), and the names of what is left out.

    Raises: ValueError if it is not clear where the model is.
    """
    taken = dict.fromkeys(("model", "optimizer", "scheduler", "step"))
    left = set(state)

    def take(kind: str, path: str, value: Any) -> None:
        taken[kind] = value
        left.discard(path.partition(".")[0])

    if model is None and isinstance(state.get("model"), Mapping):
        model = "model"
    if model is not None:
        take("model", model, _at(state, model))
    elif all(isinstance(one, torch.Tensor) for one in state.values()):
        return {**taken, "model": state}, []
    else:
        raise ValueError(f"it is not clear where the model is: there are {', '.join(state)}. Say it by --model")
    if optimiser is None:
        optimiser = next((name for name in _OPTIMISERS if isinstance(state.get(name), Mapping)), None)
    if optimiser is not None:
        take("optimizer", optimiser, _at(state, optimiser))
    if isinstance(state.get("scheduler"), Mapping):
        take("scheduler", "scheduler", state["scheduler"])
    if type(state.get("step")) is int and state["step"] >= 0:
        take("step", "step", state["step"])
    return taken, sorted(left)


def _at(state: dict[str, Any], path: str) -> dict[str, Any]:
    found: Any = state
    for part in path.split("."):
        if not isinstance(found, Mapping) or part not in found:
            raise ValueError(f"there is no {path}; there are {', '.join(state)}")
        found = found[part]
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} is no dict")
    return dict(found)


def _write(target: Path, taken: dict[str, Any]) -> None:
    """Write a checkpoint of ours, in one file."""
    states = States(taken["model"])
    if taken["optimizer"] is not None:
        numbered, names = _by_numbers(taken["optimizer"])
        states.add_optimiser(numbered, names)
    if taken["scheduler"] is not None:
        states.index.facts["scheduler"] = encode(taken["scheduler"], "scheduler", states.keep)
    tensors = states.tensors
    told = {
        key: described(Record(key, tuple(one.shape), whole(one.shape), one)) for key, one in tensors.items()
    }  # which checks the dtypes
    place = Place(target, None, None, secrets.token_hex(8))
    try:
        blocks = {key: on_disk(one) for key, one in tensors.items() if one.numel()}
        size, checksums = write_blocks(place.data / name_of(0), blocks)
        saved = {
            key: type(one)(one.dtype, one.extents, tuple(b._replace(checksum=checksums[key]) for b in one.blocks))
            for key, one in blocks_of([told]).items()
        }
        about = {"torch": torch.__version__, "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())}
        index = Index(saved, {}, states.index.facts, taken["step"], 1, place.data.name, 0, {0: size}, about)
        place.commit(index)
    except BaseException:
        place.abandon()
        raise
    finally:
        place.release()


def _by_numbers(found: dict[str, Any]) -> tuple[dict[str, Any], list[list[str]]]:
    """The state_dict of an optimiser, by numbers as torch's have it, and the names of the parameters of each group.

    Raises: ValueError if it has no names, or not the form.
    """
    state, groups = found.get("state", {}), found.get("param_groups")
    lists = isinstance(groups, list) and all(isinstance(one, Mapping) and "params" in one for one in groups)
    names = [list(one["params"]) for one in groups] if lists and groups else []
    if not lists or not all(isinstance(name, str) for own in names for name in own):
        raise ValueError(
            "an optimiser is converted if its state has the names of the parameters, as get_state_dict of "
            "torch.distributed.checkpoint.state_dict gives it (without flatten_optimizer_state_dict)"
        )
    numbers = {name: number for number, name in enumerate(name for own in names for name in own)}
    unknown = sorted(set(map(str, state)) - set(numbers))
    if unknown:
        raise ValueError(f"the optimiser has a state of {', '.join(unknown[:8])}, which is in none of its groups")
    numbered = {
        "state": {numbers[name]: kept for name, kept in state.items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in own]} for group, own in zip(groups or [], names, strict=True)
        ],
    }
    return numbered, [[MODEL + name for name in own] for own in names]
