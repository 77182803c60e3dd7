"""Tests of global tensors stand where their source stands, so that a reader finds them by its name."""

import ast
from pathlib import Path

import pytest

import distdl

SOURCE = Path(distdl.__file__).parent / "globals"
TESTS = Path(__file__).parents[1]
FILES = sorted((TESTS / "globals").rglob("test_*.py"))
# what is asked of a whole room, or of all of them
LAWS = {
    "functions/test_degenerate.py": "infinities, nan, and dims without cells, of functions of all families",
    "functions/test_every_function.py": "what torch computes of one matrix or of two",
    "functions/test_operators.py": "the operators and samples of torch's own tests",
    "models/test_compiling.py": "torch.compile around, in and behind a distributed model",
    "models/test_memory.py": "the memory that a worker needs",
    "tensor/test_cycles.py": "no function of any room is part of a reference cycle",
}


def place_of(path: Path) -> str:
    return path.relative_to(TESTS / "globals").as_posix()


@pytest.mark.parametrize("path", FILES, ids=place_of)
def test_a_file_of_tests_has_the_name_of_its_source(path):
    source = SOURCE / path.parent.relative_to(TESTS / "globals") / path.name.removeprefix("test_")
    assert source.exists() != (place_of(path) in LAWS), f"{place_of(path)} tests no {source.name}"


@pytest.mark.parametrize("path", FILES, ids=place_of)
def test_a_file_of_tests_is_no_longer_than_its_idea(path):
    assert len(path.read_text().splitlines()) <= 600


def test_each_test_runs_the_functions_that_it_defines():
    """A test that defines what workers do and never runs it passes whatever they do."""
    forgotten = []
    for path in TESTS.rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        for test in ast.walk(tree):
            if not isinstance(test, ast.FunctionDef) or not test.name.startswith("test_"):
                continue
            named = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
            inner = [node for node in test.body if isinstance(node, ast.FunctionDef) and not node.decorator_list]
            forgotten += [f"{path.name}: {test.name}.{one.name}" for one in inner if one.name not in named]
    assert not forgotten
