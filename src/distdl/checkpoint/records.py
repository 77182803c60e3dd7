"""Records: which tensors a model and its optimiser have, by their sequential names, and what a worker has of them.

Also a model whose weights lie on one worker, on all of them, or in blocks has one list of records: those of the
sequential model. So what one has saved, another can load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from distdl.geometry.boxes import Box, Shape, shape, volume, whole
from distdl.globals import GlobalTensor
from distdl.nn.module import Module
from distdl.nn.placement import sequential_name, stored_tensors
from distdl.partition import Layout, dims
from distdl.transport.communicator import Communicator
from distdl.workers.worlds import world


@dataclass(frozen=True, eq=False)
class Record:
    """One tensor of the sequential model, and this worker's part of it.

    Attributes:
        key: its name.
        extents: its whole shape.
        box: the cells that this worker has; None if it has none.
        tensor: what has them here, in any shape with so many elements; None if there is nothing.
        saves: whether this worker's cells may be those that are saved.
        equal: whether workers that have the same cells need to have the same values.
        first: whether they may have others, and those of the first worker are saved.
        home: the world of which each worker has other cells; None if all have the same.
    """

    key: str
    extents: Shape
    box: Box | None
    tensor: torch.Tensor | None
    saves: bool = True
    equal: bool = True
    first: bool = False
    home: Communicator | None = None

    @property
    def block(self) -> torch.Tensor:
        """This worker's cells, a plain tensor in the shape of the box."""
        assert self.box is not None and self.tensor is not None
        return local(self.tensor).reshape(shape(self.box))

    @property
    def is_whole(self) -> bool:
        """Whether this worker has all of its cells, as if it were alone."""
        return self.box == whole(self.extents)

    def has_copies(self, comm: Communicator | None) -> bool:
        """Whether other workers of a world may have the same cells."""
        return self.is_whole or self.home is not comm


@dataclass
class Records:
    """The records of a model.

    Attributes:
        found: by key.
        aliases: further names of tensors that have several, and the key of each.
        keys: by the id of a parameter that this worker has, its key.
    """

    found: dict[str, Record] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    keys: dict[int, str] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        self.found[record.key] = record


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this worker in a tensor, without its history."""
    return (tensor.to_local() if isinstance(tensor, GlobalTensor) else tensor).detach()


def records_of(model: torch.nn.Module) -> Records:
    """The records of a model: its parameters and its persistent buffers. No message.

    Raises: TypeError if it is no module; ValueError for a parameter whose shape is not known yet, for a tensor on the
        device meta, for a block that is not what the layout says, and for a module whose state_dict has more.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"a checkpoint needs a model that is a torch.nn.Module; got a {type(model).__name__}")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = {**parameters, **dict(_buffers(model))}
    _check_nothing_else(model, tensors)
    layouts: dict[str, tuple[str, Layout | None]] = {}
    # of the tensors that stand beside blocks in a module: whether this worker has such blocks, and their keys
    beside: dict[str, tuple[bool, str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = list(_layouts(module))
        for name, key, known in own:
            layouts.setdefault(_join(prefix, name), (_join(prefix, key), known))
        if own:
            mine = any(known.partition.comm.rank in known.partition for _, _, known in own)
            for name in (*(n for n, _ in module.named_parameters()), *(n for n, _ in module.named_buffers())):
                key = sequential_name(module, name) if "parametrizations." in name else name
                beside.setdefault(_join(prefix, name), (mine, _join(prefix, key)))
    records = Records()
    first: dict[int, str] = {}
    for path in dict.fromkeys((*layouts, *tensors)):
        tensor = tensors.get(path)
        stores, plain = beside.get(path, (True, path))
        key, layout = layouts.get(path, (plain, None))
        if tensor is not None and id(tensor) in first:
            records.aliases[key] = first[id(tensor)]
            continue
        if tensor is not None:
            first[id(tensor)] = key
            if path in parameters:
                records.keys[id(tensor)] = key
        saves = stores or layout is not None
        records.add(_record(key, tensor, layout, saves, path in parameters))
    return records


def _check_nothing_else(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Check that modules keep nothing in a state_dict but these tensors, under any name, and their extra states.

    Raises: ValueError.
    """
    known = set(map(id, tensors.values()))
    for prefix, module in model.named_modules():
        if type(module)._save_to_state_dict is not torch.nn.Module._save_to_state_dict:
            found: dict[str, Any] = {}
            module._save_to_state_dict(found, _join(prefix, ""), keep_vars=True)
            unknown = [name for name, one in found.items() if name not in tensors and id(one) not in known]
            more = [name for name in unknown if name.rpartition(".")[2] != "_extra_state"]
            if more:
                raise ValueError(
                    f"a checkpoint keeps parameters, buffers and extra states; the _save_to_state_dict of a "
                    f"{type(module).__name__} gives {', '.join(more[:8])}, too. Make it a buffer, or give the class a "
                    "get_extra_state"
                )


def _record(key: str, tensor: torch.Tensor | None, layout: Layout | None, saves: bool, is_parameter: bool) -> Record:
    if tensor is not None and torch.nn.parameter.is_lazy(tensor):
        raise ValueError(f"a checkpoint needs a model whose parameters have their shapes; {key} gets it in a forward")
    if tensor is not None and local(tensor).is_meta:
        raise ValueError(
            f"a checkpoint needs a model whose tensors have memory; {key} is on the device meta. Materialise the model "
            "first (torch.nn.Module.to_empty)"
        )
    if isinstance(tensor, GlobalTensor):
        layout = tensor.layout
    if layout is None:
        assert tensor is not None
        equal = is_parameter and saves
        return Record(key, tuple(tensor.shape), whole(tensor.shape), tensor, saves, equal, first=not is_parameter)
    me = layout.partition.comm.rank
    # a worker with a block of a tensor without cells has all of it
    nothing = tensor is not None and not volume(whole(layout.extents))
    holds = me in layout.partition and (volume(layout[me]) or nothing)
    box = layout[me] if holds else None
    if box is not None and (tensor is None or local(tensor).numel() != volume(box)):
        found = "none" if tensor is None else dims(tuple(local(tensor).shape))
        raise ValueError(f"{key} needs a block of {dims(shape(box))} on worker {me}, by its layout; it has {found}")
    return Record(key, layout.extents, box, tensor, saves, is_parameter and saves, home=layout.partition.comm)


def _layouts(module: Any) -> Iterator[tuple[str, str, Layout]]:
    """The tensors of a module that are blocks: names, those in the sequential layer, and layouts in its shapes."""
    if getattr(module, "parameter_layouts", None) is None:
        return
    flat = getattr(module, "sequential_layouts", {})
    for name, layout in stored_tensors(module):
        key = sequential_name(module, name)
        yield name, key, flat.get(key, layout) if name in getattr(module, "sequential_names", {}) else layout
    for name, layout in getattr(module, "buffer_layouts", {}).items():
        yield name, name, layout


def _buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield _join(prefix, name), buffer


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def communicator_of(model: Any) -> Communicator:
    """That of the world in which a model is distributed; else of the world in which this worker was launched."""
    if isinstance(model, torch.nn.Module):
        for module in model.modules():
            copies = getattr(module._parameters, "copies", None)
            if copies is not None:
                found: Communicator = copies.P.comm
                return found
            if isinstance(module, Module):
                for layout in getattr(module, "parameter_layouts", {}).values():
                    found = layout.partition.comm
                    return found
    return world().comm
