"""Examples of the documentation print what stands below them: those above which a comment names what starts them."""

import re
from pathlib import Path

import pytest
from launchers import ended, imported, mpirun, torchrun

DOCS = Path(__file__).parents[2] / "docs"
COMMANDS = {
    "distdl run -n 3": lambda script: [*imported(), "-m", "distdl", "run", "-n", "3", str(script)],
    "distdl run -n 2 --backend gloo": lambda script: torchrun(2, script),
    "distdl run -n 4 --backend gloo": lambda script: torchrun(4, script),  # what the command starts
    "mpirun --oversubscribe -n 4 python": lambda script: mpirun(4, script, python=imported()),
    "torchrun --nproc-per-node 4": lambda script: torchrun(4, script),
}
EXAMPLE = re.compile(r"<!-- run: (.*?) -->\n```python\n(.*?)```\n.*?```text\n(.*?)```", re.DOTALL)
EXAMPLES = [
    pytest.param(*found, id=f"{page.relative_to(DOCS)}-{number}")
    for page in sorted(DOCS.rglob("*.md"))
    for number, found in enumerate(EXAMPLE.findall(page.read_text()))
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("command", "code", "printed"), EXAMPLES)
def test_started_example_prints_what_stands_below_it(command, code, printed, tmp_path):
    """Lines of several workers come in any order. Workers of torchrun print without a buffer, so characters mix."""
    script = tmp_path / "train.py"
    script.write_text(code)
    done = ended(COMMANDS[command](script))
    assert done.returncode == 0, done.stdout + done.stderr
    pieces = list if command.startswith("torchrun") else str.splitlines
    assert sorted(pieces(done.stdout)) == sorted(pieces(printed))


def test_each_comment_that_names_a_command_has_its_example():
    marked = sum(page.read_text().count("<!-- run: ") for page in DOCS.rglob("*.md"))
    assert marked == len(EXAMPLES) > 3
