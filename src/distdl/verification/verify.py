"""The comparison of a distributed program with the sequential one, on the user's own model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from math import isfinite
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distdl.environment.progress import progress
from distdl.globals import GlobalTensor, distribute, distribute_tensor
from distdl.globals.consistency.checksums import checksum
from distdl.globals.tensor.structures import map_tensors
from distdl.partition import Partition
from distdl.partition.arguments import Split, check_split, checks_arguments
from distdl.verification.certificate import Certificate, Mismatch, versions
from distdl.verification.quantities import PLURAL, Difference, Quantity, Value, compare, distance, gather, noise
from distdl.verification.recording import Loss, Optimizer, default_loss, default_optimizer, record
from distdl.workers.worlds import launched, split_of, world

Program = Callable[..., Mapping[str, torch.Tensor]]
Values = dict[Quantity, Value]
# what was computed, what a worker has only in part, and sentences about what is not compared
Distributed = tuple[Values, Sequence[Quantity], tuple[str, ...]]
_PERTURBED = 3  # sequential runs with inputs and weights that differ in their last bit
# torch's modules that drop values in training
_DROPPING = torch.nn.modules.dropout._DropoutNd, torch.nn.MultiheadAttention, torch.nn.RNNBase
_NOTHING = 1e-6  # tensors that are as small, beside others of their kind, are zero but for rounding
_BACKWARD = "gradient of the output", "gradient of input", "gradient of weight"


@checks_arguments
def verify(
    model: torch.nn.Module | Program,
    P: Split | Program,
    inputs: Any,
    loss: Loss | None = None,
    steps: int = 2,
    optimizer: Optimizer | None = None,
    weights: str = "replicated",
) -> Certificate:
    """Prove that a distributed program computes what the sequential one does. Every worker calls it.

    ``verify(model, P, inputs)`` trains a copy of the model on worker 0 alone, and another one by
    :func:`distdl.distribute` on the workers of ``P``. It compares the output of every module, the gradient of every
    output, input and weight, and the weights and buffers after each step. ``model`` itself stays as it is.

    ``verify(sequential, candidate, inputs)`` compares two functions of the user's own, so the candidate may be
    distributed by other means. Worker 0 alone calls ``sequential(*inputs)``, every worker ``candidate(*inputs)``. Each
    returns a dict of names and tensors: whole ones, of which worker 0's count, global tensors, or DTensors of torch.

    What is rounding is found by experiment: the sequential program runs three more times, with inputs and weights that
    differ in their last bit. Two elements are equal if they differ by at most 32 times what that changes in their
    tensor, and 32 times the rounding of its largest element. In float64, errors stand out most: ``model.double()``.

    Layers of dropout draw other masks on several workers than torch does on one. Here they are switched off, and the
    certificate says so. Gradients are compared also if the caller has switched them off.

    Args:
        model: a module that every worker has built; worker 0's weights count.
        P: the partition over which the inputs are split, or its shape.
        inputs: a tensor, a tuple of the arguments, or a dict of arguments by name; the same on every worker. Tensors
            with as many dims as ``P`` has axes, or more, are split over it.
        loss: takes the model's output and gives a tensor of one element. By default, a mean of all outputs in which
            each element has another weight.
        steps: how many steps of training; each takes the same inputs.
        optimizer: takes the parameters, as ``torch.optim.AdamW`` does. By default SGD with momentum.
        weights: as of :func:`distdl.distribute`.
    Returns: the certificate, on every worker. Print it.
    Raises: AssertionError, the same on every worker, that names the first tensor that differs in the forward, and in
        the backward, with cells, values, and the worker that holds them. ValueError, on every worker, if the
        sequential program draws random numbers or two runs of it differ, if there is nothing to compare, and for a loss
        that gives something else; RuntimeError, likewise, if it fails.
    """
    if steps < 1:
        raise ValueError(f"verify needs at least one step; got {steps}")
    if isinstance(model, torch.nn.Module):
        check_split("verify", "P", P)
        grid = split_of(P, "verify")  # type: ignore[arg-type]  # check_split has seen that it is no function
        with torch.inference_mode(False), torch.enable_grad():
            return _verify_model(
                model, grid, inputs, loss or default_loss, steps, optimizer or default_optimizer, weights
            )
    if not callable(model) or not callable(P) or isinstance(P, Partition):
        raise TypeError(
            "verify takes a module and a partition, or two functions that return dicts of tensors; got "
            f"{type(model).__name__} and {type(P).__name__}"
        )
    if (loss, steps, optimizer, weights) != (None, 2, None, "replicated"):
        raise TypeError("verify of two functions takes no loss, steps, optimizer or weights: they do the steps")
    return _verify_functions(model, P, inputs)


def _verify_model(
    model: torch.nn.Module,
    P: Partition,
    inputs: Any,
    loss: Loss,
    steps: int,
    optimizer: Optimizer,
    weights: str,
) -> Certificate:
    prepared, not_compared = _without_dropout(model)
    arguments = _arguments(inputs)

    def sequentially(number: int) -> Values:
        own = deepcopy(prepared)
        if number:
            _perturb_weights(own, number)
        given = map_tensors(arguments, lambda tensor: _perturbed(tensor, number)) if number else arguments
        found = record(own, given, loss, optimizer, steps).found
        return {key: Value(tensor) for key, tensor in found.items()}

    def distributed() -> Distributed:
        own = distribute(deepcopy(prepared), P, weights=weights)
        given = map_tensors(arguments, lambda tensor: _split(tensor, P))
        recorded = record(own, given, loss, optimizer, steps)
        left_out = [f"what is in the {kind} that {name} gives" for name, kind in recorded.opaque.items()]
        if recorded.partial:
            names = ", ".join(dict.fromkeys(key.name for key in recorded.partial))
            left_out.append(f"the gradient of the output of {names}: it is made of weights alone")
        return _gathered(recorded.found, compares_copies=True), recorded.partial, (*not_compared, *left_out)

    subject = type(model).__name__
    return _proven(subject, sequentially, distributed, tuple(map(int, P.shape)), steps)


def _verify_functions(sequential: Program, candidate: Program, inputs: Any) -> Certificate:
    args, kwargs = _arguments(inputs)

    def of(results: Mapping[str, torch.Tensor]) -> dict[Quantity, torch.Tensor]:
        if not isinstance(results, Mapping) or not all(isinstance(one, torch.Tensor) for one in results.values()):
            raise TypeError("a program that verify compares returns a dict of names and tensors")
        return {Quantity(1, "result", str(name)): tensor for name, tensor in results.items()}

    def sequentially(number: int) -> Values:
        given = map_tensors((args, kwargs), lambda tensor: _perturbed(tensor, number))
        return {key: Value(tensor.detach()) for key, tensor in of(sequential(*given[0], **given[1])).items()}

    def distributed() -> Distributed:
        given = map_tensors((args, kwargs), lambda tensor: tensor.detach().clone())
        return _gathered(of(candidate(*given[0], **given[1])), compares_copies=False), (), ()

    subject = getattr(candidate, "__name__", type(candidate).__name__)
    return _proven(subject, sequentially, distributed, None, 1)


def _proven(
    subject: str,
    sequentially: Callable[[int], Values],
    distributed: Callable[[], Distributed],
    partition: tuple[int, ...] | None,
    steps: int,
) -> Certificate:
    """Run both programs, compare them on worker 0, and tell every worker the outcome.

    Args:
        sequentially: takes the number of a perturbation, 0 for none.
    """
    P = world()
    found, partial, not_compared = distributed()
    outcome = None
    if P.rank == 0:
        try:
            right = sequentially(0)
            _check_repeats(right, lambda: sequentially(0))
            runs = progress(range(_PERTURBED), "distdl.verify: perturbed runs")
            perturbed = [sequentially(1 + number) for number in runs]
            for key in partial:
                right.pop(key, None)
            outcome = _outcome(subject, right, found, noise(right, perturbed), partition, steps, not_compared)
        except _Unfit as error:
            outcome = {"error": "ValueError", "text": str(error)}
        except Exception as error:  # the others wait for the outcome, so they have to be told
            outcome = {"error": "RuntimeError", "text": f"verify: the sequential program failed: {error!r}"}
    outcome = P.broadcast_data(outcome)
    if "error" in outcome:
        raised = _ERRORS[outcome["error"]](outcome["text"])
        if isinstance(raised, Mismatch):
            raised.difference = outcome["difference"]
        raise raised
    return Certificate(**{field.name: outcome[field.name] for field in fields(Certificate)})


_ERRORS: dict[str, type[Exception]] = {
    "Mismatch": Mismatch,
    "ValueError": ValueError,
    "RuntimeError": RuntimeError,
}


class _Unfit(ValueError):
    """What :func:`verify` cannot compare."""


class _Draws(TorchDispatchMode):
    """Notes the first operator of torch that draws numbers from torch's own generator."""

    first = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.first or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        if not torch.equal(before, torch.get_rng_state()):
            self.first = f" by {func.overloadpacket}"
        return result


def _check_repeats(one: Values, again: Callable[[], Values]) -> None:
    """Check that a second run computes the same, and leaves torch's generator where the first has left it."""
    before = torch.get_rng_state()
    with _Draws() as draws:
        other = again()
    differs = (
        key
        for key, value in one.items()
        if key not in other
        or value.tensor.shape != other[key].tensor.shape
        or distance(value.tensor, other[key].tensor).any()
    )
    key = next(differs, None)
    if key is not None or not torch.equal(before, torch.get_rng_state()):
        drawn = f"It draws random numbers{draws.first}." if draws.first else "Does it draw random numbers?"
        place = "." if key is None else f"; two sequential runs differ in {key}."
        raise _Unfit(
            f"verify compares programs that compute the same on each call{place} {drawn} Switch that off, or draw them "
            "before and pass them in"
        )


def _outcome(
    subject: str,
    right: Values,
    found: Values,
    rounding: Mapping[Quantity, float],
    partition: tuple[int, ...] | None,
    steps: int,
    not_compared: tuple[str, ...],
) -> dict[str, Any]:
    """The attributes of the certificate, or the name of an error and its text."""
    if not right and not found:
        raise _Unfit("verify has nothing to compare: both programs return no tensors")
    missing = [key for key in right if key not in found] + [key for key in found if key not in right]
    if missing:
        has, lacks = ("sequential", "distributed") if missing[0] in right else ("distributed", "sequential")
        text = f"{subject}: the {has} program computes {missing[0]}, and the {lacks} one does not"
        difference = {"subject": subject, "missing": [str(key) for key in missing]}
        return {"error": "Mismatch", "text": f"{text} ({len(missing)} such tensors)", "difference": difference}
    differences = {key: compare(value.tensor, found[key], rounding[key]) for key, value in right.items()}
    if any(one.problem for one in differences.values()):
        return {"error": "Mismatch", **_told(subject, differences)}
    blurred = _blurred(differences)
    if blurred:
        more = f" and {len(blurred) - 1} more tensors" if len(blurred) > 1 else ""
        not_compared += (f"{blurred[0]}{more}: rounding alone may change each by as much as its largest value",)
    counted = Counter(PLURAL[key.kind] for key in right if key not in blurred)
    compared = {key: one for key, one in differences.items() if key not in blurred} or differences
    worst, largest = max(compared.items(), key=lambda item: item[1].largest)
    margins = [one.largest / one.allowed for one in compared.values() if one.largest]
    return {
        "subject": subject,
        "workers": world().size,
        "partition": partition,
        "backend": launched() or "serial",
        "dtypes": tuple(sorted({str(value.tensor.dtype).removeprefix("torch.") for value in right.values()})),
        "steps": steps,
        "compared": dict(counted),
        "largest": largest.largest,
        "where": f"{worst}, cell {largest.cell}",
        "scale": largest.scale,
        "margin": max(margins, default=0.0),
        "not_compared": not_compared,
        "versions": versions(),
    }


def _blurred(differences: Mapping[Quantity, Difference]) -> list[Quantity]:
    """Tensors in which rounding may explain any difference. Those that are zero but for rounding are none of them."""
    largest: defaultdict[str, float] = defaultdict(float)
    for key, one in differences.items():
        largest[key.kind] = max(largest[key.kind], one.scale)
    return [key for key, one in differences.items() if one.allowed >= one.scale > _NOTHING * largest[key.kind]]


def _told(subject: str, differences: Mapping[Quantity, Difference]) -> dict[str, Any]:
    """The first tensor that differs in the forward and in the backward, and the last that agrees before each.

    Returns: this as ``text`` and, as data, ``difference``.
    """
    wrong = [key for key, one in differences.items() if one.problem]
    lines = [f"{subject}: the distributed program does not compute what the sequential one does."]
    difference: dict[str, Any] = {"subject": subject, "differing": len(wrong), "tensors": len(differences)}
    for title, within in (("forward", False), ("backward", True)):
        keys = [key for key in differences if (key.kind in _BACKWARD) == within]
        first = next((key for key in keys if differences[key].problem), None)
        difference[title] = None
        if first is not None:
            before, one = keys[: keys.index(first)], differences[first]
            lines.append(f"First in the {title}, {first} {one.problem}.")
            lines += [f"The last that agrees before it is {before[-1]}."] if before else []
            difference[title] = {
                **first._asdict(),
                "largest": one.largest if isfinite(one.largest) else None,
                "cell": list(one.cell),
                "allowed": one.allowed,
                "problem": one.problem,
                "agrees before": str(before[-1]) if before else None,
            }
    lines.append(f"{len(wrong)} of {len(differences)} tensors differ.")
    return {"text": "\n".join(lines), "difference": difference}


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def _split(tensor: torch.Tensor, P: Partition) -> torch.Tensor:
    return distribute_tensor(tensor, P) if tensor.ndim >= len(P.shape) else tensor


def _gathered(found: Mapping[Quantity, torch.Tensor], compares_copies: bool) -> Values:
    """The whole tensors on worker 0. Every worker has to have recorded the same ones.

    Args:
        compares_copies: whether plain tensors are the same on every worker; those that are not come with the copies.
    """
    P, keys = world(), sorted(found)
    recorded = P.allgather_data([str(key) for key in keys])
    for worker, names in enumerate(recorded):
        if names != recorded[0]:
            other = next(iter(set(names) ^ set(recorded[0])), "another order")
            raise AssertionError(
                f"every worker has to compute the same tensors; workers 0 and {worker} differ in {other}"
            )
    whole = {key: gather(found[key]) for key in keys}
    if compares_copies:
        plain = [key for key in keys if not isinstance(found[key], GlobalTensor)]
        sums = P.allgather_data([checksum(found[key]) for key in plain])
        for number, key in enumerate(plain):
            if len({one[number] for one in sums}) > 1:
                copies = P.allgather_data(found[key].detach().as_subclass(torch.Tensor))
                whole[key] = whole[key]._replace(copies=tuple(enumerate(copies))[1:])
    return {key: whole[key] for key in found}


def _without_dropout(model: torch.nn.Module) -> tuple[torch.nn.Module, tuple[str, ...]]:
    """A copy whose layers of dropout do nothing, and sentences that say which these are."""
    own = deepcopy(model)
    off = []
    for name, module in own.named_modules():
        attribute = "p" if isinstance(module, torch.nn.modules.dropout._DropoutNd) else "dropout"
        if isinstance(module, _DROPPING) and module.training and getattr(module, attribute):
            setattr(module, attribute, 0.0)
            off.append(name or "the model")
    sentence = f"dropout, which is switched off in {', '.join(off)}: it draws other masks on several workers"
    return own, (sentence,) if off else ()


def _perturb_weights(model: torch.nn.Module, number: int) -> None:
    for parameter in model.parameters():
        parameter.data = _perturbed(parameter.data, number)


def _perturbed(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """A copy, of which each element that is no integer is larger or smaller by about its last bit.

    Args:
        number: which perturbation; 0 for none.
    """
    if not number or not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return tensor.detach().clone()
    generator = torch.Generator().manual_seed(number)
    signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device) * 2 - 1
    return tensor.detach() * (1 + torch.finfo(tensor.dtype).eps * signs.to(tensor.dtype))
