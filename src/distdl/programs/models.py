"""What one worker does at each call of a compiled model: as of a compiled step, but the backward comes later."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from itertools import combinations
from typing import Any

import torch

from distdl.geometry.regions import Region, meet
from distdl.globals.layouts.context import Context
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.structures import map_tensors
from distdl.programs.calls import Step, leaf_of
from distdl.programs.halves import Halves, Joint, Strides
from distdl.programs.inductor import with_inductor
from distdl.programs.matching import same_bits
from distdl.programs.memory import storage_of
from distdl.programs.nodes import (
    DIFFERENTIATED,
    Gradients,
    Graph,
    Node,
    Recorded,
    Replayed,
    next_node,
    unfit_graph,
)  # fmt: skip
from distdl.programs.program import Program
from distdl.programs.reach import Reach
from distdl.programs.recorder import Recorder
from distdl.programs.structures import Result, others_in, versions_of
from distdl.programs.worker import Worker, all_fit
from distdl.tensors.draws import Draws

_TRIES = 8  # recorded forwards of one signature, at most
_FOREIGN = (
    "distdl.compile: {} was recorded, and {}. It did not in its first call. Pass that tensor as an argument, detach it "
    "or call the model itself, model._orig_mod"
)
_AGAIN = (
    "distdl.compile: {} was replayed, and {}. {}, so its forward is not computed once more for that. Call the model "
    "itself, model._orig_mod, in such a step"
)


class ModelWorker(Worker):
    """The programs of one worker for one model."""

    counts_gradients = False
    function: torch.nn.Module

    @property
    def name(self) -> str:
        return f"the model {type(self.function).__name__}"

    def _first(self, program: Program, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """The same. It finds out what keeps it from being a node, and whether its backward is differentiated."""
        number, versions = next_node(), versions_of(tensors)
        result = super()._first(program, tensors, args, kwargs)
        found = Result(result)
        requires = [one.requires_grad for one in found.tensors]
        if not any(requires):
            return result
        known = [leaf_of(one) for _, one in Reach(self.function, (args, kwargs)).tensors.values()]
        told = unfit_graph(found.tensors, tensors, known, number)
        told = told or _unfit_result(result, found.tensors, [*tensors, *known])
        if versions_of(tensors) != versions:
            told = "it writes into its arguments"
        if told:
            self._leave(program, told)
            return result

        def seen(seeds: Gradients) -> Gradients:
            if torch.is_grad_enabled() and not program.reasons:
                self._leave(program, DIFFERENTIATED)
            return seeds

        return found.made(Node.apply(seen, found.tensors, requires, *found.tensors))

    def _leave(self, program: Program, reason: str) -> None:
        """Let later calls stay as they are."""
        program.line, program.reasons = None, program.reasons or [(reason, "")]
        self._tell(program)

    def _record(self, program: Program, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        reach = Reach(self.function, (args, kwargs))
        told = self._unfit(reach, args, kwargs)
        if not told and program.recorded >= _TRIES:
            told = "no backward comes to its results, as in predictions without torch.no_grad()"
        if told:
            return self._refuse(program, told, "", args, kwargs)
        cut, (given, named) = _cut(tensors, (args, kwargs))
        program.modules = {path: module for module, path in reach.modules.items()}
        recorder = Recorder(reach, tensors, program.comm)
        known = [leaf_of(one) for _, one in reach.tensors.values()]
        number, before = next_node(), (_drawn(program), versions_of(known))
        result, found, values = self._run(program, recorder, tensors, given, named)
        results, found.tensors = found.tensors, []
        requires = [one.requires_grad for one in results]
        if not any(requires):
            self._take(program, recorder, Step(recorder.calls, recorder.sources, values, recorder.lies))
            return result
        owners = [one for _, one in reach.tensors.values() if leaf_of(one).requires_grad]
        inner, outer = [*cut, *map(leaf_of, owners)], [*_outer(tensors), *map(leaf_of, owners)]
        told = unfit_graph(results, [], inner, number)
        if told and cut:
            raise RuntimeError(_FOREIGN.format(self.name, told))
        told = told or _unfit_result(result, results, [*tensors, *known])
        if told:
            recorder.problem(told)
        if recorder.problems:
            program.reasons = recorder.problems
            self._tell(program)
            return found.made(list(Graph(results, inner, outer).joined())) if cut else result
        same = before == (_drawn(program), versions_of(known))
        repeatable = same and not recorder.draws and self._keeps_no_statistics()

        def finish(gradients: list[Any], begin: int, strides: list[Strides]) -> None:
            if program.line is not None or program.reasons:
                return
            if any(call.kind == "gradient" for call in recorder.calls):
                recorder.problem("it sets gradients itself")
            compared = [values, gradients, begin, strides, requires, list(map(id, owners))]
            joint = Joint(recorder.calls, recorder.sources, compared, recorder.lies, begin, len(tensors), strides)
            self._take(program, recorder, joint)
            if program.line is not None:
                program.halves = Halves(joint, requires, owners, repeatable)
                program.line = program.halves.forward

        return found.made(list(Recorded(results, inner, outer, recorder, len(tensors), finish).joined()))

    def _keeps_no_statistics(self) -> bool:
        """Whether no module has buffers that its forward may write, and no autocast is on."""
        autocast = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        return not autocast and not any(
            module.training and next(module.buffers(False), None) is not None for module in self.function.modules()
        )

    def _replay(
        self, program: Program, tensors: list[torch.Tensor], args: Any, kwargs: Any, graph: Graph | None = None
    ) -> Any:
        halves, result = program.halves, program.result
        if halves is None or result is None:
            return super()._replay(program, tensors, args, kwargs)
        outer = [*_outer(tensors), *map(leaf_of, halves.owners)]
        again = self._again(program, halves, tensors, outer, args, kwargs)
        found, count = self._found(program, tensors), len(halves.requires)
        compare = None if graph is None else self._compared(program, halves, tensors, graph)
        replayed = Replayed(halves, found[count:], program.comm, again, compare)
        return result.made(Node.apply(replayed.gradients, found[:count], halves.requires, *outer))

    def _compile(self, program: Program) -> None:
        if program.halves is None:
            super()._compile(program)
            return
        program.halves.change(with_inductor)
        program.line = program.halves.forward

    def _again(
        self, program: Program, halves: Halves, tensors: list[torch.Tensor], outer: Any, args: Any, kwargs: Any
    ) -> Callable[[str], Graph]:
        """What computes a call as it is, for a backward that the line cannot do. Later calls stay as they are."""
        versions = versions_of([*tensors, *outer])

        def again(reason: str) -> Graph:
            told = ""
            if not halves.repeatable:
                told = "It draws random numbers or keeps statistics"
            elif versions_of([*tensors, *outer]) != versions:
                told = "An argument or a parameter was written since"
            elif program.state is None or not program.state.holds():
                told = "The model was changed since"
            self._leave(program, reason)
            if told:
                raise RuntimeError(_AGAIN.format(self.name, reason, told))
            return self._with_graph(halves, tensors, outer, args, kwargs)[1]

        return again

    def _with_graph(
        self, halves: Halves, tensors: list[torch.Tensor], outer: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Graph]:
        """What the model gives as it is, and its graph."""
        cut, (given, named) = _cut(tensors, (args, kwargs))
        with torch.enable_grad():
            result = self.function(*given, **named)
        return result, Graph(Result(result).tensors, [*cut, *map(leaf_of, halves.owners)], outer)

    def _as_it_is(self, program: Program, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> tuple[Any, Any]:
        halves = program.halves
        if halves is None:
            return super()._as_it_is(program, tensors, args, kwargs)
        return self._with_graph(halves, tensors, [*_outer(tensors), *map(leaf_of, halves.owners)], args, kwargs)

    def _compared(
        self, program: Program, halves: Halves, tensors: list[torch.Tensor], graph: Graph
    ) -> Callable[[Gradients, Gradients], None]:
        """What compares the gradients of a replay with those of the model as it is, whose graph is given."""
        names = [f"argument {n}" for n in range(len(_outer(tensors)))]
        known = {id(one): name for name, one in Reach(self.function, ()).tensors.values()}
        names += [known.get(id(one), "a parameter") for one in halves.owners]

        def compare(seeds: Gradients, found: Gradients) -> None:
            if not all_fit(program.comm, halves.lie_as_recorded(seeds)):
                return  # these add up in another order
            told = ""
            for name, mine, theirs in zip(names, found, graph.gradients(seeds), strict=True):
                same = mine is theirs is None or (mine is not None and theirs is not None and same_bits(mine, theirs))
                told = told or ("" if same else f"the gradient of {name}")
            self._assert_same(program, told)

        return compare


def _outer(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The arguments that require gradients, each once."""
    return list({id(one): one for one in tensors if one.requires_grad}.values())


def _cut(tensors: list[torch.Tensor], arguments: Any) -> tuple[list[torch.Tensor], Any]:
    """Arguments with leaves in the place of tensors that require gradients: their gradients are those of this call.

    Returns: the leaves, of global tensors their blocks, in the order of :func:`_outer`; and the arguments.
    """
    made: dict[int, Any] = dict.fromkeys(map(id, _outer(tensors)))

    def leaf(one: torch.Tensor) -> torch.Tensor:
        own = block_of(one) if type(one) is GlobalTensor else one
        if id(own) not in made:
            return one
        if made[id(own)] is None:
            made[id(own)] = copy(one) if type(one) is GlobalTensor else one.detach().requires_grad_()
        found: torch.Tensor = made[id(own)]
        return found

    arguments = map_tensors(arguments, leaf)
    return list(map(leaf_of, made.values())), arguments


def _drawn(program: Program) -> Any:
    """How many random numbers were drawn until now."""
    return None if program.comm is None else Context.of(program.comm).own(Draws).counted()


def _unfit_result(result: Any, results: list[torch.Tensor], others: list[torch.Tensor]) -> str:
    """Why a result cannot be that of a node; empty if it can."""
    foreign = next(others_in(result), None)
    if foreign is not None:
        return f"its result has a {type(foreign).__name__}"
    there = [one for one in results if one.numel()]
    places = list(map(storage_of, there))
    if 0 in places:
        return "its result is sparse"
    regions = [Region.of(one.shape, one.stride(), int(one.storage_offset()), one.itemsize) for one in there]
    if not {storage_of(one) for one in others if one.numel()}.isdisjoint(places) or any(
        places[one] == places[other] and meet(regions[one], regions[other])
        for one, other in combinations(range(len(there)), 2)
    ):
        return "its result shares memory with an argument, a parameter or another result"
    return ""
