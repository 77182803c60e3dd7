"""The contents of a checkpoint: what a worker has of a model and what belongs to it, and what all have together."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from distdl.checkpoint import optimisers, randomness
from distdl.checkpoint.index import MODEL, Index, blocks_of, described
from distdl.checkpoint.records import Records, records_of
from distdl.checkpoint.together import together
from distdl.checkpoint.values import encode
from distdl.transport.communicator import Communicator


@dataclass
class Contents:
    """What one worker has.

    Attributes:
        records: of all tensors, with keys as in the index.
        facts: what stands in the index besides, in JSON.
    """

    records: Records
    facts: dict[str, Any]


def collect(
    comm: Communicator,
    model: torch.nn.Module,
    optimiser: torch.optim.Optimizer | None,
    scheduler: Any,
    random: bool = True,
) -> Contents:
    """What this worker has. No message.

    Raises: ValueError or TypeError for what cannot be kept.
    """
    records = of_model(model)
    keep = optimisers.keeper(records)
    facts = {
        "optimiser": None if optimiser is None else optimisers.describe(optimiser, records),
        "scheduler": None if scheduler is None else encode(state_of(scheduler), "scheduler", keep),
        "scheduler_kind": None if scheduler is None else type(scheduler).__name__,
        "random": randomness.describe(model, comm, records) if random else None,
        "extra_state": {
            path: encode(module.get_extra_state(), f"extra_state/{path}", keep)
            for path, module in having_extra_state(model)
        },
    }
    return Contents(records, facts)


def of_model(model: torch.nn.Module) -> Records:
    """The records of a model, with keys as in an index."""
    found = records_of(model)
    return Records(
        found={MODEL + key: replace(record, key=MODEL + key) for key, record in found.found.items()},
        aliases={MODEL + name: MODEL + key for name, key in found.aliases.items()},
        keys={number: MODEL + key for number, key in found.keys.items()},
    )


def state_of(scheduler: Any) -> Any:
    """The state of a scheduler.

    Raises: TypeError if it has none.
    """
    if not callable(getattr(scheduler, "state_dict", None)):
        raise TypeError(f"a checkpoint needs a scheduler with a state_dict; got a {type(scheduler).__name__}")
    return scheduler.state_dict()


def having_extra_state(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The modules that keep more than tensors, by torch's ``get_extra_state``; one with two names under both."""
    plain, named = torch.nn.Module.get_extra_state, model.named_modules(remove_duplicate=False)
    return [(path, module) for path, module in named if type(module).get_extra_state is not plain]


def agree(
    comm: Communicator, what: str, collected: Callable[[], Contents], call: Callable[[], dict[str, Any]]
) -> tuple[Contents, Index]:
    """What each worker has, and all of them together. Collective.

    Args:
        what: the user's call.
        collected: returns this worker's contents.
        call: returns the call's arguments, which have to be the same on every worker.
    Raises: the same error on every worker.
    """
    own: list[Contents] = []

    def describe() -> str:
        own.append(collected())
        records = own[0].records
        tensors = {key: described(one, comm) for key, one in records.found.items() if one.tensor is not None}
        return json.dumps({"call": call(), "tensors": tensors, "aliases": records.aliases, "facts": own[0].facts})

    told = [json.loads(one) for one in together(comm, what, describe)]
    check_alike(what, [one["call"] for one in told])
    return own[0], _merged(told, comm.size)


def check_alike(what: str, calls: list[dict[str, Any]]) -> None:
    """Check that all workers have called with the same arguments.

    Raises: ValueError that names one that differs, and two workers.
    """
    for worker, one in enumerate(calls):
        for name, value in calls[0].items():
            if one[name] != value:
                raise ValueError(
                    f"{what} needs the same {name} on every worker; it is {value!r} on worker 0 and {one[name]!r} on "
                    f"worker {worker}"
                )


def _merged(told: list[dict[str, Any]], workers: int) -> Index:
    facts = [one["facts"] for one in told]
    for name in ("scheduler", "extra_state", "optimiser"):
        values = [one[name] for one in facts]
        if name == "optimiser" and None not in values:
            continue
        other = next((worker for worker, one in enumerate(values) if one != values[0]), None)
        if other is not None:
            mine, theirs = (json.dumps(values[worker])[:200] for worker in (0, other))
            raise ValueError(
                f"a checkpoint needs the same {name} on every worker; it is {mine} on worker 0 and {theirs} on worker "
                f"{other}"
            )
    optimiser, random = facts[0]["optimiser"], facts[0]["random"]
    return Index(
        tensors=blocks_of([one["tensors"] for one in told]),
        aliases={name: key for one in told for name, key in one["aliases"].items()},
        facts={
            "optimiser": None if optimiser is None else optimisers.merge([one["optimiser"] for one in facts]),
            "scheduler": facts[0]["scheduler"],
            "scheduler_kind": facts[0]["scheduler_kind"],
            "random": None if random is None else randomness.merge([one["random"] for one in facts]),
            "extra_state": facts[0]["extra_state"],
        },
        step=told[0]["call"].get("step"),
        workers=workers,
        about={"torch": torch.__version__, "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())},
    )
