"""Between a distributed model and the plain state_dicts of the sequential one, bit for bit, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from distdl.checkpoint import optimisers
from distdl.checkpoint.contents import Contents, agree, collect, of_model
from distdl.checkpoint.index import MODEL, Index, Saved
from distdl.checkpoint.loading import Staged, install_together
from distdl.checkpoint.records import Record, communicator_of
from distdl.checkpoint.together import together
from distdl.checkpoint.values import decode, encode, free
from distdl.geometry.boxes import Box, slices
from distdl.transport.communicator import Communicator, as_bytes

_EXTRA = "_extra_state"


def export_state(
    model: torch.nn.Module, optimiser: torch.optim.Optimizer | None = None, *, on: int | None = None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The ``state_dict`` that the sequential model would have, and that of its optimiser. Collective.

    Args:
        model, optimiser: as of :func:`distdl.save`.
        on: the worker that gets them; the others get empty ones. If not given, every worker gets them.
    Returns: two state_dicts of whole tensors on the CPU, which torch's ``load_state_dict`` reads on one worker; the
        second is None without an optimiser. Parameters are numbered in the order of the optimiser's groups.
    Raises: the same error on every worker, as :func:`distdl.save`.
    """
    comm = communicator_of(model)
    what = "distdl.export_state"

    def collected() -> Contents:
        if on is not None and not (type(on) is int and 0 <= on < comm.size):
            raise ValueError(f"{what} needs on= to be a worker from 0 to {comm.size - 1}; got {on!r}")
        return collect(comm, model, optimiser, None, random=False)

    own, index = agree(comm, what, collected, lambda: {"on": on})
    found = {key: _whole(comm, saved, own.records.found.get(key), on) for key, saved in index.tensors.items()}
    if on is not None and comm.rank != on:
        return {}, None if optimiser is None else {}
    state, of_optimiser = plain_states(index, found)
    return _in_order(state, model), of_optimiser


def _in_order(state: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """The same as the model's ``state_dict`` lists it: module by module, its parameters and then its buffers."""
    # state_dict lists a shared module at each of its paths
    paths = (path for path, _ in model.named_modules(remove_duplicate=False))
    modules = {path: at for at, path in enumerate(paths)}

    def place(key: str) -> tuple[int, int, int]:
        path, _, name = key.rpartition(".")
        while path not in modules:
            path, _, name = path.rpartition(".")
        module = model.get_submodule(path)
        kinds = list(module._parameters), list(module._buffers), [_EXTRA]
        # parameters that have another name in the layer come in the order of its layouts
        kind = next((at for at, names in enumerate(kinds) if name in names), 0)
        return modules[path], kind, kinds[kind].index(name) if name in kinds[kind] else 0

    return {key: state[key] for key in sorted(state, key=place)}


def plain_states(index: Index, found: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The state_dicts of the model and, if there is one, of the optimiser, from the whole tensors of an index."""
    state: dict[str, Any] = {key.removeprefix(MODEL): one for key, one in found.items() if key.startswith(MODEL)}
    state |= {name.removeprefix(MODEL): found[key] for name, key in index.aliases.items()}
    for path, extra in index.facts["extra_state"].items():
        state[f"{path}.{_EXTRA}" if path else _EXTRA] = decode(extra, found.__getitem__)
    optimiser = index.facts["optimiser"]
    return state, None if optimiser is None else _optimiser_state(optimiser, found)


def import_state(
    model: torch.nn.Module,
    state: Mapping[str, Any],
    optimiser: torch.optim.Optimizer | None = None,
    optimiser_state: Mapping[str, Any] | None = None,
) -> None:
    """Load the ``state_dict`` of the sequential model, and of its optimiser, of which each worker takes its part.

    Args:
        model, optimiser: as of :func:`distdl.load`.
        state, optimiser_state: of the sequential model and its optimiser, the same on every worker. The optimiser's
            groups have their parameters in the same order as those of ``optimiser``.
    Raises: the same error on every worker, as :func:`distdl.load`, and then nothing was set.
    """
    comm = communicator_of(model)
    what = "distdl.import_state"

    def names() -> list[list[str]] | None:
        if (optimiser is None) is not (optimiser_state is None):
            raise ValueError(f"{what} needs both an optimiser and its state, or none of them")
        return None if optimiser is None else optimisers.names_of(optimiser, of_model(model))

    told = together(comm, what, names)
    staged: list[Staged] = []

    def stage() -> list[str]:
        source = States(state)
        if optimiser_state is not None:
            source.add_optimiser(optimiser_state, [optimisers.in_order(list(one)) for one in zip(*told, strict=True)])
        staged.append(Staged(source, model, optimiser, None))
        return list(staged[0].names)

    install_together(comm, what, stage, staged)


def _whole(comm: Communicator, saved: Saved, record: Record | None, on: int | None) -> torch.Tensor:
    """A whole tensor, from the workers that have its blocks."""
    everyone = tuple(range(comm.size))
    receives = on is None or comm.rank == on
    whole = torch.empty(saved.extents if receives else 0, dtype=saved.dtype, device="cpu")
    for block in saved.blocks:
        mine = comm.rank == block.worker
        if not (mine or receives):
            continue
        shape = [stop - start for start, stop in block.box]
        cells = torch.empty(shape, dtype=saved.dtype, device="cpu")
        if mine:
            assert record is not None
            cells.copy_(record.block)
        if on is None:
            others = tuple(worker for worker in everyone if worker != block.worker)
            comm.through.broadcast((block.worker, *others), as_bytes(cells)).wait()
        elif block.worker != on:
            messages = [(on if mine else block.worker, as_bytes(cells))]
            comm.through.exchange(messages if mine else [], [] if mine else messages).wait()
        if receives:
            whole[slices(block.box)] = cells
    return whole


def _optimiser_state(facts: dict[str, Any], found: dict[str, torch.Tensor]) -> dict[str, Any]:
    groups: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    for group in facts["groups"]:
        own = []
        for name in group["params"]:
            numbers[name] = len(numbers)
            own.append(numbers[name])
        plain = [name.removeprefix(MODEL) for name in group["params"]]
        named = {"param_names": plain} if group["named"] else {}
        groups.append({**decode(group["options"], found.__getitem__), **named, "params": own})
    state = {
        number: {
            key: found[one["tensor"]] if "tensor" in one else decode(one["value"], found.__getitem__)
            for key, one in facts["state"][name].items()
        }
        for name, number in numbers.items()
        if name in facts["state"]
    }
    return optimisers.joined(state, groups, optimisers.further_of(facts, found.__getitem__))


class States:
    """State_dicts, as a source of tensors.

    Attributes:
        index: what there is; without blocks.
        tensors: by the keys of the index.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping):
            raise TypeError(f"a state_dict is needed; got a {type(state).__name__}")
        self.tensors: dict[str, torch.Tensor] = {}
        extra = {}
        for name, value in state.items():
            if name.rpartition(".")[2] == _EXTRA:
                path = name.rpartition(".")[0]
                extra[path] = encode(value, f"extra_state/{path}", self.keep)
            elif isinstance(value, torch.Tensor):
                self.tensors[MODEL + name] = value
            else:
                raise TypeError(f"a state_dict needs tensors; {name} is a {type(value).__name__}")
        nothing = dict.fromkeys(("optimiser", "scheduler", "scheduler_kind", "random"))
        self.index = Index({}, {}, {**nothing, "extra_state": extra}, None, 1)
        self._list()

    def add_optimiser(self, state: Mapping[str, Any], names: list[list[str]]) -> None:
        """Add the state of an optimiser whose parameters have these names.

        Raises: ValueError if its groups have others.
        """
        sizes = [len(group["params"]) for group in state["param_groups"]]
        if sizes != [len(own) for own in names]:
            raise ValueError(
                f"the optimiser has groups of {[len(own) for own in names]} parameters; those of the state have {sizes}"
            )
        groups, kept = [], {}
        for place, (own, group) in enumerate(zip(names, state["param_groups"], strict=True)):
            options = encode(optimisers.options(group), f"optimiser/groups/{place}", self.keep)
            groups.append({"params": own, "named": False, "options": options})
            for name, number in zip(own, group["params"], strict=True):
                if number in state["state"]:
                    kept[name] = {key: self._described(name, key, one) for key, one in state["state"][number].items()}
        further = encode(optimisers.besides(state), "optimiser/besides", self.keep)
        self.index.facts["optimiser"] = {"kind": "", "groups": groups, "state": kept, "besides": further}
        self._list()

    def read(self, key: str, box: Box) -> torch.Tensor:
        """The cells of a box."""
        return self.tensors[key].detach()[slices(box)].cpu().clone()

    def _described(self, name: str, key: str, value: Any) -> dict[str, Any]:
        path = f"optimiser/{name}/{key}"
        if not isinstance(value, torch.Tensor):
            return {"value": encode(value, path, self.keep)}
        path = self.keep(path, value)
        follows = name in self.tensors and value.shape == self.tensors[name].shape
        return {"tensor": path, "follows": follows and not optimisers.is_count(key, value.shape)}

    def keep(self, path: str, tensor: torch.Tensor) -> str:
        """Add a tensor; returns its key."""
        key = free(path, self.tensors)
        self.tensors[key] = tensor
        return key

    def _list(self) -> None:
        for key, one in self.tensors.items():
            self.index.tensors[key] = Saved(one.dtype, tuple(one.shape), ())
