"""Lines that have gone leave nothing behind: no text, no generated function, and no tensor."""

import gc
import linecache
import resource
import warnings
import weakref

import torch

import distdl

SIGNATURES = 1000
PAGE = resource.getpagesize()


def texts():
    return {file for file in linecache.cache if file.startswith("<a step of distdl.compile")}


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def test_lines_of_many_signatures_go():
    model, lines, held = torch.nn.Linear(2, 2), weakref.WeakSet(), []

    @distdl.compile(signatures=2)
    def step(x, factor):
        loss = (model(x) * factor).sum()
        loss.backward()
        return loss

    before = texts()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(SIGNATURES):
            for _ in range(4):
                model.zero_grad()
                step(torch.ones(3, 2), number)
            lines.add(step.programs[-1].line)
            if number in (SIGNATURES // 2, SIGNATURES - 1):
                gc.collect()
                held.append((len(gc.get_objects()), resident()))
    assert step.programs[-1].line is not None
    assert len(lines) == 2
    assert len(texts() - before) == 2  # those of other tests may go meanwhile
    (objects, memory), (objects_later, memory_later) = held
    assert objects_later < objects + SIGNATURES // 10
    assert memory_later < memory + 2048 * SIGNATURES


def test_a_step_that_goes_frees_its_tensors():
    def made():
        model = torch.nn.Linear(2, 2)

        @distdl.compile
        def step(x):
            loss = model(x).sum()
            loss.backward()
            return loss

        for _ in range(5):
            model.zero_grad()
            step(torch.ones(3, 2))
        return [weakref.ref(one) for one in (step.programs[0].line, model.weight)]

    found = made()
    gc.collect()
    assert [one() for one in found] == [None, None]
