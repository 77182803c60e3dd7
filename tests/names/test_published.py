"""Every row of the table of published names: it can be imported, is called as published, and has what it should."""

import ast
import importlib
import inspect
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
from launchers import ended, imported, mpirun
from mpi4py import MPI
from published import ROWS as FIRST
from published_further import FURTHER

import distdl.nn as dnn
from distdl.backends.mpi.buffer import MPIBufferManager, MPIExpandableBuffer
from distdl.backends.mpi.partition import MPIPartition
from distdl.utilities.torch import TensorStructure

FOLDER = Path(__file__).parent
ROWS = [*FIRST, *FURTHER]
CHECKS = ["mpi_partitions", "mpi_tensors", "mpi_movements", "mpi_layers", "mpi_networks", "mpi_further"]
NETWORKS = ["lenet", "vgg", "resnet"]
EXAMPLES = {
    "MPIPartition": lambda P: P,
    "MPICartesianPartition": lambda P: P.reshape(1, 1),
    "MPIExpandableBuffer": lambda P: MPIExpandableBuffer(np.float32),
    "MPIBufferManager": lambda P: MPIBufferManager(),
    "TensorStructure": lambda P: TensorStructure(),
    "Repartition": lambda P: dnn.Repartition(P.reshape(1, 1), P.reshape(1, 1)),
    "DistributedLinear": lambda P: dnn.DistributedLinear(P.reshape(1, 1), P.reshape(1, 1), P.reshape(1, 1), 2, 3),
}
for n in (1, 2, 3):
    shape = [1] * (n + 2)
    EXAMPLES[f"DistributedFeatureConv{n}d"] = lambda P, n=n, shape=shape: getattr(dnn, f"DistributedConv{n}d")(
        P.reshape(shape), in_channels=2, out_channels=3, kernel_size=1
    )
    EXAMPLES[f"DistributedConvTranspose{n}d"] = lambda P, n=n, shape=shape: getattr(
        dnn, f"DistributedConvTranspose{n}d"
    )(P.reshape(shape), in_channels=2, out_channels=3, kernel_size=1)
    for kind in ("Channel", "General"):
        EXAMPLES[f"Distributed{kind}Conv{n}d"] = lambda P, name=f"Distributed{kind}Conv{n}d", shape=shape: getattr(
            dnn, name
        )(P.reshape(shape), P.reshape(shape), P.reshape(shape), 2, 3, 1)


def names_of(rows):
    return [f"{row.module}.{row.name}" for row in rows]


def found(row):
    return reduce(getattr, row.name.split("."), importlib.import_module(row.module))


def parameters(callable_, method=False):
    listed = list(inspect.signature(callable_).parameters.values())[int(method) :]
    return [p.replace(annotation=p.empty) for p in listed]


def as_written(signature):
    return parameters(eval(f"lambda {signature}: None", {"COMM_NULL": MPI.COMM_NULL, "GROUP_NULL": MPI.GROUP_NULL}))


def without_default(parameter):
    return parameter.replace(default=parameter.empty)


@pytest.mark.parametrize("row", ROWS, ids=names_of(ROWS))
def test_it_can_be_imported(row):
    found(row)


CALLED = [row for row in ROWS if row.signature is not None]


@pytest.mark.parametrize("row", CALLED, ids=names_of(CALLED))
def test_it_is_called_as_published(row):
    here = parameters(found(row), method="." in row.name)
    published = as_written(row.signature)
    assert len(here) >= len(published)
    assert all(more.default is not more.empty for more in here[len(published) :])
    for ours, theirs in zip(here, published, strict=False):
        # what has no default there may have one here
        assert (without_default(ours) if theirs.default is theirs.empty else ours) == theirs


HAVING = {row.name: row for row in ROWS if row.attributes}


@pytest.mark.parametrize("name", [name for name in HAVING if not name.endswith("Loss")])
def test_it_has_the_published_attributes(name):
    example = EXAMPLES[name](MPIPartition(MPI.COMM_SELF))
    assert type(example).__name__ == name
    assert [word for word in HAVING[name].attributes.split() if not hasattr(example, word)] == []


@pytest.mark.parametrize("network", NETWORKS)
def test_networks_use_published_names_only(network):
    tree = ast.parse((FOLDER / f"{network}.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"numpy", "torch", "distdl.nn"}
    used = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "dnn"
    }
    assert len(used) > 4 and used <= {row.name for row in ROWS if row.module == "distdl.nn"}


def functions_of(path):
    return [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]


def test_every_behaviour_has_a_test_and_every_check_belongs_to_a_name():
    defined = {name for path in FOLDER.glob("*.py") for name in functions_of(path)}
    shown = {word for row in ROWS for word in row.shown_by.split()}
    assert shown <= defined
    assert {name for name in defined if name.startswith("check_")} <= shown


@pytest.mark.timeout(180)
def test_all_checks_under_mpi():
    command = mpirun(4, FOLDER / "run_names.py", *CHECKS, python=imported())
    done = ended(command, 170, DISTDL_TIMEOUT="20")
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [name for module in CHECKS for name in functions_of(FOLDER / f"{module}.py") if name[:6] == "check_"]
    assert done.stdout.split() == expected and {path.stem for path in FOLDER.glob("mpi_*.py")} == set(CHECKS)
