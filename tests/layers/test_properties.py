"""Every property of every layer on every back-end, and the table in the docs that says so."""

import json
import subprocess
import sys

import properties
import pytest
from launchers import mpirun, python_path

LIMIT = 240  # seconds for a launch and all its cells
SCRIPT = properties.HERE / "properties.py"
LAYERS = properties.cells()


@pytest.fixture(scope="session", params=["threads", "gloo", "mpi"])
def results(request, tmp_path_factory):
    """What each cell gave on each worker, and what the job printed."""
    folder = tmp_path_factory.mktemp(request.param)
    alone = [sys.executable, str(SCRIPT), str(folder), request.param]
    command = mpirun(properties.WORKERS, SCRIPT, str(folder)) if request.param == "mpi" else alone
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=python_path(DISTDL_TIMEOUT="60"), timeout=LIMIT
        )
        output = f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    except subprocess.TimeoutExpired as error:
        output = f"not ended after {LIMIT} s\n{error.stdout}\n{error.stderr}"
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
