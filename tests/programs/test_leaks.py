"""Lines that have gone leave nothing behind: no text, no generated function, and no tensor."""

import gc
import linecache
import warnings
import weakref

import torch

import distdl


def texts():
    return {file for file in linecache.cache if file.startswith("<a step of distdl.compile")}


def test_lines_of_many_signatures_go():
    model, weights = torch.nn.Linear(2, 2), []

    @distdl.compile(signatures=2)
    def step(x, factor):
        loss = (model(x) * factor).sum()
        loss.backward()
        return loss

    before = texts()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(250):
            for _ in range(4):
                model.zero_grad()
                step(torch.ones(3, 2), number)
            weights.append(weakref.ref(step.programs[-1].line))
    assert step.programs[-1].line is not None
    assert sum(one() is not None for one in weights) == 2
    assert len(texts() - before) == 2  # those of other tests may go meanwhile


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
