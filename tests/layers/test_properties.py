"""Every property of every layer on every back-end, and the table in the docs that says so."""

import functools
import json
import traceback
import warnings

import properties
import pytest
from launchers import LIMIT

import distdl

LAYERS = properties.cells()


@pytest.fixture(scope="session", params=["threads", "gloo", "mpi"])
def results(request, tmp_path_factory, suites):
    """What each cell gave on each worker, and what the job printed."""
    if request.param == "threads":
        folder, output = tmp_path_factory.mktemp("threads"), ""
        try:
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch's own, of the reduction "mean"
                distdl.run_workers(functools.partial(properties.run, folder), properties.WORKERS, "threads")
        except Exception:
            output = traceback.format_exc()
    else:
        folder, output = suites(request.param)
    files = [folder / f"{rank}.json" for rank in range(properties.WORKERS)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files], output


@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize("layer", LAYERS)
def test_layer(results, layer):
    workers, output = results
    for rank, found in enumerate(workers):
        assert layer in found, f"{layer} was not reached on worker {rank}\n{output}"
        for name in properties.PROPERTIES:
            assert found[layer].get(name) in properties.RESULTS, f"{layer}, {name}, worker {rank}: {found[layer]}"
        assert found[layer] == workers[0][layer]


@pytest.mark.timeout(LIMIT + 20)
def test_the_page_has_the_table(results):
    workers, output = results
    assert set(workers[0]) == set(LAYERS), output
    assert properties.PAGE.read_text() == properties.page(workers[0]), "python tests/layers/properties.py writes it"
