"""Optimisers: what they keep of each parameter follows the parameter, whole or in blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from distdl.checkpoint.checking import is_kind
from distdl.checkpoint.records import Record, Records, local
from distdl.checkpoint.values import decode, encode, free
from distdl.geometry.boxes import whole
from distdl.globals import GlobalTensor
from distdl.globals.layouts.context import Context
from distdl.partition import dims

Read = Callable[[str, "Record | None"], torch.Tensor]


def describe(optimiser: torch.optim.Optimizer, records: Records) -> dict[str, Any]:
    """What stands in the index for this worker's part of an optimiser; its tensors are added to the records.

    Returns: ``groups``, each with its options and the names of its parameters; the ``state`` of each parameter: of
        each of its values the key of a tensor and whether it ``follows`` the parameter's blocks, or the value; and what
        it has ``besides``, as of :func:`besides`.
    Raises: TypeError if it is no optimiser; ValueError for a parameter that the model does not have, and for a tensor
        that is neither a block like that of its parameter nor the same on every worker.
    """
    if not isinstance(optimiser, torch.optim.Optimizer):
        raise TypeError(f"a checkpoint needs an optimiser of torch's; got a {type(optimiser).__name__}")
    names = names_of(optimiser, records)
    found = optimiser.state_dict()
    keep = keeper(records)
    groups = [
        {
            "params": own,
            "named": "param_names" in group,
            "options": encode(options(group), f"optimiser/groups/{place}", keep),
        }
        for place, (own, group) in enumerate(zip(names, found["param_groups"], strict=True))
    ]
    state: dict[str, Any] = {}
    numbers = [number for group in found["param_groups"] for number in group["params"]]
    for number, name in zip(numbers, [name for own in names for name in own], strict=True):
        parameter = records.found[name]
        if parameter.box is not None:  # state of a block without cells tells nothing
            own = found["state"].get(number, {})
            state[name] = {key: _described(value, key, parameter, records) for key, value in own.items()}
    further = encode(besides(found), "optimiser/besides", keep)
    return {"kind": type(optimiser).__name__, "groups": groups, "state": state, "besides": further}


def names_of(optimiser: torch.optim.Optimizer, records: Records) -> list[list[str]]:
    """The names of the parameters of each group.

    Raises: ValueError for a parameter that the model does not have.
    """
    for place, group in enumerate(optimiser.param_groups):
        for number, parameter in enumerate(group["params"]):
            if id(parameter) not in records.keys:
                raise ValueError(
                    f"a checkpoint needs an optimiser of the model's parameters; parameter {number} of group {place} "
                    f"({dims(tuple(parameter.shape))}) is none of them"
                )
    return [[records.keys[id(parameter)] for parameter in group["params"]] for group in optimiser.param_groups]


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group: all but its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def besides(found: Mapping[str, Any]) -> dict[str, Any]:
    """What a state_dict has besides the groups and the state of their parameters: in ``state``, and beside it."""
    numbers = {number for group in found["param_groups"] for number in group["params"]}
    others = {key: one for key, one in found["state"].items() if key not in numbers}
    further = {key: one for key, one in found.items() if key not in ("state", "param_groups")}
    return {**further, "state": others} if others else further


def joined(state: dict[Any, Any], groups: list[dict[str, Any]], besides: dict[str, Any]) -> dict[str, Any]:
    """A state_dict of an optimiser, of which :func:`besides` has told what it has besides."""
    return {**besides, "state": {**state, **besides.get("state", {})}, "param_groups": groups}


def keeper(records: Records) -> Callable[[str, torch.Tensor], str]:
    """For :func:`encode`: adds tensors that are the same on every worker to the records."""

    def keep(path: str, tensor: torch.Tensor) -> str:
        if isinstance(tensor, GlobalTensor):
            raise ValueError(f"a checkpoint keeps global tensors of models and optimisers only; {path} is one")
        key = free(path, records.found)
        records.add(Record(key, tuple(tensor.shape), whole(tensor.shape), tensor))
        return key

    return keep


def is_count(key: str, extents: Sequence[int]) -> bool:
    """Whether it is where an optimiser of torch counts: beside a parameter that is a number, too, and no moment."""
    return key == "step" and not extents


def _described(value: Any, key: str, parameter: Record, records: Records) -> dict[str, Any]:
    path = f"optimiser/{parameter.key}/{key}"
    if not isinstance(key, str):
        raise ValueError(f"a checkpoint keeps what an optimiser has of a parameter under names; {path} is none")
    if not isinstance(value, torch.Tensor):
        return {"value": encode(value, path, _keeper_beside(parameter, records))}
    assert parameter.tensor is not None
    follows = isinstance(value, GlobalTensor) is isinstance(parameter.tensor, GlobalTensor) and (
        value.shape == parameter.tensor.shape and not is_count(key, value.shape)
    )
    if follows:
        other = parameter.tensor
        if isinstance(value, GlobalTensor) and isinstance(other, GlobalTensor) and value.layout != other.layout:
            raise ValueError(f"{path} needs to be split as its parameter is")
        # not compared, as the parameter is
        records.add(Record(path, parameter.extents, parameter.box, value, equal=False))
    elif isinstance(value, GlobalTensor):
        layout = value.layout
        me = layout.partition.comm.rank
        box = layout[me] if me in layout.partition and value.to_local().numel() else None
        records.add(Record(path, layout.extents, box, value, home=layout.partition.comm))
    elif value.dim() == 0 or parameter.is_whole:
        records.add(Record(path, tuple(value.shape), whole(value.shape), value))
    else:
        block = dims(tuple(parameter.tensor.shape))
        raise ValueError(
            f"{_SPLIT} to be one number, or to have the shape of the block, {block}; {path} has "
            f"{dims(tuple(value.shape))}"
        )
    return {"tensor": path, "follows": follows}


_SPLIT = "a checkpoint needs what an optimiser keeps of a parameter that is split"


def _keeper_beside(parameter: Record, records: Records) -> Callable[[str, torch.Tensor], str]:
    """For :func:`encode` of a list or dict that is kept of a parameter: tensors in it are not blocks."""
    keep = keeper(records)

    def whole_only(path: str, tensor: torch.Tensor) -> str:
        if isinstance(tensor, GlobalTensor):
            raise ValueError(
                f"{_SPLIT} to be no list or dict of global tensors, as LBFGS has them; {path} is in one. Save "
                "distdl.optimizer_state_dict(optimizer), and the model without its optimiser"
            )
        if tensor.dim() and not parameter.is_whole and not isinstance(parameter.tensor, GlobalTensor):
            raise ValueError(f"{_SPLIT} to be no list or dict of tensors; {path} is in one")
        return keep(path, tensor)

    return whole_only


def restored(optimiser: torch.optim.Optimizer, records: Records, index: dict[str, Any], read: Read) -> dict[str, Any]:
    """The state_dict of this worker's optimiser, from what stands in an index.

    Args:
        index: as :func:`describe` returns it, of all workers together.
        read: gives the tensor of a key: with a record, the cells that this worker has of it, else the whole.
    Raises: ValueError if the optimiser is of another class with options that were not saved, has other groups, or other
        parameters in them.
    """
    names = names_of(optimiser, records)
    _check_kind(optimiser, index)
    check_groups(names, index)
    state: dict[int, dict[str, Any]] = {}
    groups = []
    number = 0
    for own, group, saved in zip(names, optimiser.param_groups, index["groups"], strict=True):
        options = decode(saved["options"], lambda key: read(key, None))
        placed = options.get("capturable") or options.get("fused")
        numbers = []
        for name, parameter in zip(own, group["params"], strict=True):
            kept = index["state"].get(name, {})
            if kept:
                state[number] = {
                    key: _value(key, one, parameter, records.found[name], read, bool(placed))
                    for key, one in kept.items()
                }
            numbers.append(number)
            number += 1
        named = {"param_names": group["param_names"]} if "param_names" in group else {}
        groups.append({**options, "params": numbers, **named})
    return joined(state, groups, further_of(index, lambda key: read(key, None)))


def further_of(index: dict[str, Any], tensor: Callable[[str], torch.Tensor]) -> dict[str, Any]:
    """What stands in an index of that which :func:`besides` has told; nothing if an earlier distdl has written it."""
    found: dict[str, Any] = decode(index.get("besides", {"dict": []}), tensor)
    return found


def _check_kind(optimiser: torch.optim.Optimizer, index: dict[str, Any]) -> None:
    """Check that an optimiser is of the class that was saved, or derives from it, or has no further options.

    (Adam has none besides those of AdamW. A state_dict does not say its class.)

    Raises: ValueError.
    """
    if is_kind(optimiser, index["kind"]):
        return
    saved = {name for group in index["groups"] for name, _ in group["options"]["dict"]}
    missing = sorted(set(optimiser.defaults) - saved)
    if missing:
        raise ValueError(
            f"saved was the optimiser {index['kind']}, and not {type(optimiser).__name__}: it has no "
            f"{', '.join(missing)}"
        )


def check_groups(names: list[list[str]], index: dict[str, Any]) -> None:
    """Check that the names of an optimiser's parameters are those of an index, as far as this worker has them.

    Raises: ValueError.
    """
    saved = [group["params"] for group in index["groups"]]
    if len(saved) != len(names):
        raise ValueError(f"the optimiser has {len(names)} groups of parameters; saved were {len(saved)}")
    for place, (own, theirs) in enumerate(zip(names, saved, strict=True)):
        other = sorted(set(own) - set(theirs))
        if other:
            raise ValueError(
                f"group {place} of the optimiser has {', '.join(other[:8])}; this group was saved without "
                f"{'it' if len(other) == 1 else 'them'}"
            )


def _value(name: str, found: dict[str, Any], parameter: torch.Tensor, record: Record, read: Read, placed: bool) -> Any:
    if "value" in found:
        return decode(found["value"], lambda key: read(key, None))
    key = found["tensor"]
    # checkpoints of early versions may say that a count follows its parameter
    if found["follows"] and not is_count(name, record.extents):
        cells = read(key, record).to(parameter.device)
        block = torch.empty_like(local(parameter), dtype=cells.dtype).copy_(cells.reshape(local(parameter).shape))
        return GlobalTensor._of(block, parameter._layout) if isinstance(parameter, GlobalTensor) else block
    value = read(key, None)
    if isinstance(parameter, GlobalTensor) and value.dim():
        context: Context = parameter._context
        layout = context.whole(tuple(value.shape), 0)
        return GlobalTensor._of(value if layout.active else value.new_zeros(layout.local), layout)
    return value.to(parameter.device) if placed or value.dim() else value


def merge(told: list[dict[str, Any]]) -> dict[str, Any]:
    """An optimiser, from what each worker has described.

    Raises: ValueError that names the workers, if they differ in options, or in what they keep of a parameter.
    """
    first = told[0]
    for worker, one in enumerate(told):
        if (one["kind"], len(one["groups"])) != (first["kind"], len(first["groups"])):
            raise ValueError(
                f"the optimiser has to be the same on every worker; on worker 0 it is {first['kind']} with "
                f"{len(first['groups'])} groups, on worker {worker} {one['kind']} with {len(one['groups'])}"
            )
        for place, group in enumerate(one["groups"]):
            ours, theirs = first["groups"][place]["options"], group["options"]
            if ours != theirs:
                raise ValueError(
                    f"the options of group {place} of the optimiser have to be the same on every worker; "
                    f"{_difference(ours, theirs, worker)}"
                )
        if one["besides"] != first["besides"]:
            raise ValueError(
                "what the optimiser keeps besides its parameters has to be the same on every worker; "
                f"{_difference(first['besides'], one['besides'], worker)}"
            )
    groups = [
        {
            "params": in_order([one["groups"][place]["params"] for one in told]),
            "named": group["named"],
            "options": group["options"],
        }
        for place, group in enumerate(first["groups"])
    ]
    state: dict[str, Any] = {}
    owner: dict[str, int] = {}
    for worker, one in enumerate(told):
        for name, kept in one["state"].items():
            if name in state and state[name] != kept:
                raise ValueError(
                    f"what the optimiser keeps of {name} has to be the same on every worker; "
                    f"{_difference({'dict': [*state[name].items()]}, {'dict': [*kept.items()]}, worker, owner[name])}"
                )
            state.setdefault(name, kept)
            owner.setdefault(name, worker)
    return {
        "kind": first["kind"],
        "groups": groups,
        "state": {name: kept for name, kept in state.items() if kept},
        "besides": first["besides"],
    }


def _difference(ours: Any, theirs: Any, worker: int, first: int = 0) -> str:
    """Where two dicts differ, as they stand in JSON."""
    mine, other = ({str(key): value for key, value in one["dict"]} for one in (ours, theirs))
    for key in (*mine, *other):
        if mine.get(key, "nothing") != other.get(key, "nothing"):
            return (
                f"{key} is {mine.get(key, 'nothing')} on worker {first} and {other.get(key, 'nothing')} on worker "
                f"{worker}"
            )
    return f"their order differs on workers {first} and {worker}"


def in_order(lists: list[list[str]]) -> list[str]:
    """The names that workers have, each some of them, in an order that is that of each worker, if there is one."""
    found = sorted(lists, key=len)[-1].copy()
    for names in lists:
        place = 0
        for name in names:
            if name in found:
                place = found.index(name) + 1
            else:
                found.insert(place, name)
                place += 1
    return found
