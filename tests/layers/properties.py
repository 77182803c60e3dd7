"""What each layer does with each property: the table of ``docs/details/exactness.md``.

Every ``properties_*.py`` beside this file has CELLS: layer -> property -> a function of the world of four workers. It
asserts, and returns what it has shown: ``exact`` (output, gradient of the input and gradients of all parameters are
those of the sequential layer), ``refused`` (the same ValueError on every worker) or ``none`` (the layer knows no such
thing).

``python tests/layers/properties.py`` runs all cells on threads and writes the table.
"""

from __future__ import annotations

import importlib
import json
import traceback
from pathlib import Path

import distdl

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "details" / "exactness.md"
WORKERS = 4
PROPERTIES = (
    "stride", "dilation", "even kernel", "deep halo", "uneven", "empty", "batch split", "channel split",
    "double backward", "padding modes",
)  # fmt: skip
RESULTS = {"exact": "exact", "refused": "refused", "none": "-"}


def cells():
    """Layer -> property -> function, of all files, in the order of their names."""
    found = {}
    for path in sorted(HERE.glob("properties_*.py")):
        for layer, row in importlib.import_module(path.stem).CELLS.items():
            assert layer not in found and set(row) <= set(PROPERTIES), (path.stem, layer, sorted(row))
            found[layer] = row
    return found


def run(folder=None):
    """Run all cells on this worker. The first that fails ends the job, for its workers are no longer in step."""
    P = distdl.world()
    results = {}
    for layer, row in cells().items():
        for name in PROPERTIES:
            cell = row.get(name)
            try:
                result = "none" if cell is None else cell(P)
                assert result in RESULTS, result
            except BaseException:
                result = traceback.format_exc()
                raise
            finally:
                results.setdefault(layer, {})[name] = result
                if folder is not None:
                    Path(folder, f"{P.rank}.json").write_text(json.dumps(results))
    return results


def table(results):
    """The results as a table of Markdown."""
    rows = ["| layer | " + " | ".join(PROPERTIES) + " |", "|---" * (1 + len(PROPERTIES)) + "|"]
    for layer, row in sorted(results.items()):
        rows.append(f"| `{layer}` | " + " | ".join(RESULTS[row[name]] for name in PROPERTIES) + " |")
    return "\n".join(rows) + "\n"


def page(results):
    """The page with its table replaced."""
    text = PAGE.read_text()
    return text[: text.index("| layer |")] + table(results)


if __name__ == "__main__":
    PAGE.write_text(page(distdl.run_workers(run, WORKERS)[0]))
