"""Every example runs, alone and in launched jobs, and prints what its comments say."""

import functools
import re
import runpy
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
from cases import MAKERS
from launchers import ended, imported, mpirun, torchrun

import distdl

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LARGE = ("lenet_digits", "unet3d", "vae_decode")  # that check by themselves what they print
SMALL = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in LARGE)
SCRIPT = Path(__file__).parent / "run_examples.py"
JOBS = {  # the examples that each runs, in one launch
    "threads": (lambda: [*imported(), str(SCRIPT)], LARGE),
    "mpirun": (lambda: mpirun(4, SCRIPT, python=imported()), (*SMALL, *LARGE)),
    "torchrun": (lambda: torchrun(4, SCRIPT), (*SMALL, "lenet_digits")),
}
LIMIT = 400  # seconds for a job


@pytest.fixture(scope="session")
def job(tmp_path_factory):
    """``job(launcher)``: what each example of the job printed, and the picture that it wrote."""
    folder = tmp_path_factory.mktemp("pictures")

    @functools.cache
    def start(launcher):
        command, names = JOBS[launcher]
        picture = folder / f"{launcher}.png"
        words = [f"{name}={picture}" if name == "vae_decode" else name for name in names]
        # (while worker 0 trains a model alone, the others wait: on a busy machine for minutes)
        done = ended([*command(), *words], LIMIT, DISTDL_TIMEOUT=str(LIMIT // 2))
        printed = dict(re.findall(r"^# (\w+)\n(.*?)(?=^# |\Z)", done.stdout, re.DOTALL | re.MULTILINE))
        return done, printed, picture

    return start


def printed_by(job, launcher, name):
    """What an example printed; a job that failed is an error for the example at which it ended."""
    done, printed, _ = job(launcher)
    assert name in printed, f"{name} was not reached\n{done.stdout}{done.stderr}"
    assert done.returncode == 0 or name != list(printed)[-1], done.stdout + done.stderr
    return printed[name]


def expected(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    return text[text.index("# It prints:\n") + 13 :].replace("# ", "")


def test_there_is_an_example_for_every_primitive():
    assert {re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name in MAKERS} <= set(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_on_threads(name, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out == expected(name)


@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_in_a_launched_job(launcher, job):
    for name in SMALL:
        assert printed_by(job, launcher, name) == expected(name)


def test_the_readme_example_runs_as_it_stands(tmp_path, capsys):
    lines, code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    short = re.sub(r"torch.rand\(.*?\)", "x", code)
    assert all(line.partition("  #")[0].strip() in short for line in lines.splitlines())
    assert len([line for line in code.splitlines() if line]) <= 15
    script = tmp_path / "first.py"
    script.write_text(code)
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[3] == "worker 3 holds (2, 8, 8, 11) of (2, 8, 16, 23)"


def test_imports_of_every_snippet_are_sorted(tmp_path):
    """So that lint accepts a snippet that somebody saves among the files of the repository."""
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)):
            (tmp_path / f"{page.parent.name}_{page.stem}_{number}.py").write_text(textwrap.dedent(code))
    ruff = [sys.executable, "-m", "ruff", "check", "--select", "I", "--config", ROOT / "pyproject.toml", "--no-cache"]
    done = subprocess.run([*ruff, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def printed_examples():
    """The examples of the documentation that stand above what they print, except those that a command starts."""
    docs = ROOT / "docs"
    example = re.compile(r"(<!-- run: .*-->\n)?```python\n((?:(?!```)[\s\S])*)```\n\n```text\n([\s\S]*?)```")
    for page in sorted(docs.rglob("*.md")):
        for number, (command, code, output) in enumerate(example.findall(page.read_text())):
            if not command:
                yield pytest.param(code, output, id=f"{page.relative_to(docs)}-{number}")


@pytest.mark.parametrize(("code", "output"), list(printed_examples()))
def test_documented_example_prints_what_stands_below_it(code, output, tmp_path, monkeypatch, capsys):
    script = tmp_path / "example.py"
    script.write_text(code)
    monkeypatch.chdir(tmp_path)  # an example may write files
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out == output


def lenet(printed):
    """The number of epochs, and the accuracy in percent, of a run whose losses and weights are the sequential ones."""
    *epochs, accuracy, difference = printed.splitlines()
    assert all(float(line.rpartition(" ")[2]) < 1e-10 for line in epochs)
    assert accuracy.startswith("accuracy on 360 test images:")
    assert difference.startswith("largest difference of any weight") and float(difference.split()[-1]) <= 1e-8
    return len(epochs), float(accuracy.split()[-1].rstrip("%"))


@pytest.mark.timeout(LIMIT + 20)
def test_lenet_equals_the_sequential_network_and_learns(job):
    epochs, accuracy = lenet(printed_by(job, "threads", "lenet_digits"))
    assert epochs >= 2 and accuracy >= 96


@pytest.mark.timeout(LIMIT)
def test_lenet_with_a_compiled_step_equals_the_sequential_network(capsys):
    """For one epoch of 23 steps."""
    module = runpy.run_path(str(EXAMPLES / "lenet_digits.py"))
    main = module["main"]
    main.__globals__.update(EPOCHS=1, BATCH=64, LEAST_ACCURACY=0.0)
    with warnings.catch_warnings(action="error", category=UserWarning):  # a step that stays as it is warns
        distdl.run_workers(functools.partial(main, True), 4)
    epochs, accuracy = lenet(capsys.readouterr().out)
    assert epochs == 1 and accuracy >= 50


@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_lenet_equals_the_sequential_network_in_a_launched_job(launcher, job):
    """For one epoch of 23 steps."""
    epochs, accuracy = lenet(printed_by(job, launcher, "lenet_digits"))
    assert epochs == 1 and accuracy >= 50  # after four epochs it is 96; by chance, 10


@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize("launcher", ["threads", "mpirun"])
@pytest.mark.parametrize("name", ["unet3d", "vae_decode"])
def test_a_model_that_is_distributed_needs_a_share_of_the_memory(name, launcher, job):
    """And computes the same, or the example itself would stop."""
    found = re.findall(r"(sequential|worker \d) holds at most +([\d.]+) MiB", printed_by(job, launcher, name))
    assert [who for who, _ in found] == ["sequential", *(f"worker {worker}" for worker in range(4))]
    sequential, *workers = (float(size) for _, size in found)
    # (threads read each other's messages in place, and memory counts for the worker that meets it first)
    assert max(workers) < (0.7 if launcher == "mpirun" else 0.9) * sequential and sum(workers) < 2.8 * sequential
    assert name != "vae_decode" or job(launcher)[2].exists()


@pytest.mark.timeout(200)
def test_a_volume_is_segmented_with_a_compiled_step():
    """The example compares the bits of the losses by itself, and times a step."""
    done = ended([*imported(), str(EXAMPLES / "unet3d.py"), "--compile"], 180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stays as it is" not in done.stderr
    _, distributed, *_, compiled, times = done.stdout.splitlines()
    assert distributed.split()[2:] == compiled.split()[2:] and len(compiled.split()) == 6
    assert re.fullmatch(r"a step without the optimiser: \d+ ms as it is, \d+ ms compiled", times)
