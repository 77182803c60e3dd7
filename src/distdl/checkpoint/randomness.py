"""What random numbers follow from: torch's generators, the counters of dropout layers, the draws of a world."""

from __future__ import annotations

from typing import Any

import torch

from distdl.checkpoint.records import Record, Records
from distdl.geometry.boxes import whole
from distdl.globals.layouts.context import Context
from distdl.tensors.draws import Draw, Draws
from distdl.transport.communicator import Communicator


def describe(model: torch.nn.Module, comm: Communicator, records: Records) -> dict[str, Any]:
    """What stands in the index for this worker's random numbers; the generators' states are added to the records."""
    for kind, state in _generators():
        key = f"random/{kind}/{comm.rank}"
        records.add(Record(key, tuple(state.shape), whole(state.shape), state))
    layers = {}
    for path, layer in _layers(model):
        if layer.P_x.workers.flat[0] == comm.rank:  # the first worker's seed is that of all workers
            layers[path] = list(layer.random_state)
    context: Context | None = comm.kept.get(Context)
    known = None if context is None else context.own(Draws)
    draws = None if known is None else [known.seed, [list(one) for one in known.counted()]]
    return {"layers": layers, "draws": draws if comm.rank == 0 else None}


def merge(told: list[dict[str, Any]]) -> dict[str, Any]:
    """That of all workers, from what each has described."""
    layers = {path: state for one in told for path, state in one["layers"].items()}
    return {"layers": layers, "draws": told[0]["draws"]}


def restore(model: torch.nn.Module, comm: Communicator, found: dict[str, Any], states: dict[str, torch.Tensor]) -> None:
    """Go on with the random numbers that were saved. Layers that the saved model did not have stay as they are.

    Args:
        states: of generators, by kind.
    """
    for path, layer in _layers(model):
        if path in found["layers"]:
            layer.random_state = tuple(found["layers"][path])
    if found["draws"] is not None:
        seed, counted = found["draws"]
        Context.of(comm).own(Draws).resume(seed, [Draw(*one) for one in counted])
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def check(states: dict[str, torch.Tensor]) -> None:
    """Check that torch's generators can go on with these states.

    Raises: ValueError.
    """
    for kind, own in _generators():
        if kind in states and (states[kind].dtype, states[kind].shape) != (own.dtype, own.shape):
            found = f"{tuple(states[kind].shape)} {states[kind].dtype}"
            raise ValueError(
                f"{found} is no state of torch's {kind} generator, which has {tuple(own.shape)} {own.dtype}"
            )


def keys_for(worker: int, size: int, workers: int, keys: Any) -> dict[str, str]:
    """By kind of generator, the key of the state with which a worker goes on: its own, or that of worker 0 if another
    number of workers has saved.
    """
    own = worker if size == workers else 0
    named = {kind: f"random/{kind}/{own}" for kind in ("torch", "cuda")}
    return {kind: key for kind, key in named.items() if key in keys}


def _generators() -> list[tuple[str, torch.Tensor]]:
    found = [("torch", torch.get_rng_state())]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.append(("cuda", torch.cuda.get_rng_state()))
    return found


def _layers(model: torch.nn.Module) -> list[tuple[str, Any]]:
    return [(path, module) for path, module in model.named_modules() if hasattr(module, "random_state")]
