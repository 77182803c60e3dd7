"""Nothing from a file or from another machine runs as code, and nothing listens beside the transports."""

import ast
import hashlib
import json
import os
import pickle
from pathlib import Path

import audit
import numpy as np
import pytest
import zarr

import distdl
from distdl.data import BlockDataset

SOURCE = Path(distdl.__file__).parent
ROOT = SOURCE.parents[1]

# what runs code that it reads, and the only files that may use it
RUNS_CODE = {
    # between a process and those that it started, through pipes; an unpickler that builds what it knows, and no more
    "pickle": {"workers/processes.py", "checkpoint/dcp.py"},
    "multiprocessing": {"workers/processes.py", "workers/launchers.py"},
    "marshal": set(), "shelve": set(), "dill": set(), "cloudpickle": set(), "joblib": set(), "yaml": set(),
    # the user's script; a line, which is made of the names and numbers of a recorded step
    "eval": set(), "exec": {"commands/run.py", "programs/line.py"},
}  # fmt: skip


def files():
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text())


def used(tree):
    """Modules that a file imports, and functions that it calls by a plain name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id


def test_what_runs_code_is_used_where_it_may_be():
    found = {(name, file) for file, tree in files() for name in used(tree) if name in RUNS_CODE}
    assert not [(name, file) for name, file in found if file not in RUNS_CODE[name]]
    assert {name for name, _ in found} >= {"pickle", "exec"}


def test_loaders_are_told_not_to_unpickle_and_nothing_else_listens():
    listening = set()
    for file, tree in files():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            if name == "np.load":
                assert given.get("allow_pickle") == "False", file
            if name == "torch.load":
                assert given.get("weights_only") == "True", file
            assert not (name.startswith(("dist.", "torch.distributed.")) and "_object" in name), f"{file}: {name}"
            if name.rpartition(".")[2] in ("create_server", "listen", "Listener", "TCPStore"):
                listening.add((file, name))
    assert listening == {
        ("transport/stores.py", "socket.create_server"), ("transport/stores.py", "dist.TCPStore"),
    }  # fmt: skip


class _Malicious:
    def __reduce__(self):
        return os.mkdir, (os.environ["DISTDL_TEST_MARK"],)


@pytest.mark.parametrize("kind", ["npy", "zarr"])
def test_a_malicious_file_of_a_dataset_runs_no_code(monkeypatch, tmp_path, kind):
    mark = tmp_path / "has run"
    monkeypatch.setenv("DISTDL_TEST_MARK", str(mark))
    path = tmp_path / f"data.{kind}"
    if kind == "npy":
        np.save(path, np.array([[_Malicious()]], dtype=object), allow_pickle=True)
    else:
        path.mkdir()
        filters = [{"id": "vlen-utf8"}, {"id": "pickle"}]
        about = {"zarr_format": 2, "shape": [1, 1], "chunks": [1, 1], "dtype": "|O", "compressor": None}
        (path / ".zarray").write_text(json.dumps({**about, "fill_value": 0, "order": "C", "filters": filters}))
        (path / "0.0").write_bytes(pickle.dumps(_Malicious()))

    def main():
        P = distdl.world().reshape(1, 1)
        return BlockDataset(str(path), P)[0]

    with pytest.raises((ValueError, TypeError)):
        distdl.run_workers(main, 1, "serial")
    if kind == "zarr":  # which has refused it for its dtype; also what decodes the chunk refuses to unpickle it
        with pytest.raises(RuntimeError, match=r"Pickle\.decode is disabled"):
            zarr.open(path, mode="r")[:]
    assert not mark.exists()
    pickle.loads(pickle.dumps(_Malicious()))
    assert mark.exists()


# -- the audit of the dependencies


def test_all_that_the_project_names_is_pinned_once():
    pins, problems = audit.read_lock((ROOT / "constraints.txt").read_text())
    named = audit.named_in((ROOT / "pyproject.toml").read_text())
    assert problems == [] and {"torch", "numpy", "mpi4py", "pytest"} <= named <= set(pins)


def test_the_audit_finds_what_is_wrong():
    pins, problems = audit.read_lock("numpy==1\nNumPy==2  # again\ntorch>=2\n# a comment\n")
    assert pins == {"numpy": "1"} and len(problems) == 2 and "twice" in problems[0] and "'torch>=2'" in problems[1]
    installed, absent = audit.closure(["pytest", "no-such-package"])
    assert "pluggy" in installed and absent == {"no-such-package"}
    wrong = list(audit.differing({"pytest": "0.1"}, installed))
    assert any(line.startswith("pytest is pinned at 0.1, and ") for line in wrong)
    assert any(line.startswith("pluggy ") and line.endswith("not pinned") for line in wrong)
    assert list(audit.altered(installed["pluggy"])) == []


def test_the_audit_finds_altered_files(tmp_path):
    from importlib.metadata import Distribution

    folder = tmp_path / "thing-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1\n")
    digest = audit.base64.urlsafe_b64encode(hashlib.sha256(b"one").digest()).rstrip(b"=").decode()
    (folder / "RECORD").write_text(f"thing.py,sha256={digest},3\ngone.py,sha256={digest},3\n")
    (tmp_path / "thing.py").write_text("one")
    found = Distribution.at(folder)
    assert list(audit.altered(found)) == ["thing: gone.py is missing"]
    (tmp_path / "thing.py").write_text("two")
    assert next(audit.altered(found)) == "thing: thing.py differs from what was installed"
