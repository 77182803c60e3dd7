"""``distdl.report``: how a model is distributed, as one page."""

from __future__ import annotations

import os
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch

from distdl.partition import Partition
from distdl.partition.arguments import Split, checks_arguments
from distdl.reporting.contents import Contents, gathered
from distdl.reporting.page import page
from distdl.tracing import Trace
from distdl.tracing.reading import read
from distdl.workers.worlds import opened


@dataclass(frozen=True)
class Report:
    """A report of a model. A notebook shows its page.

    Attributes:
        contents: what it tells, as values.
    """

    contents: Contents

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file.

        Raises: OSError if it cannot be written.
        """
        Path(path).write_text(page(self.contents), encoding="utf-8")

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{escape(page(self.contents))}" width="100%" height="700"></iframe>'


@checks_arguments
def report(
    model: torch.nn.Module,
    P: Split,
    input_shape: Any,
    path: str | os.PathLike[str] = "report.html",
    trace: str | os.PathLike[str] | Trace | None = None,
    *,
    dtype: torch.dtype | None = None,
    backward: bool = True,
    splits: bool = True,
    **options: Any,
) -> Report:
    """Write a page that shows how a model is distributed. It is one file, and loads nothing from a network.

    The page has the model as a tree with shapes, splits and pictures of layouts; the memory of each worker beside that
    of the sequential run; who sends how much to whom; what falls back and why; and the splits that ``suggest`` ranks.
    It comes from rehearsals, as :func:`distdl.summary`: nothing is computed, and no message is sent. Each worker of P
    is rehearsed, so a report takes as many times longer than a summary. Worker 0 of a world that is open writes the
    file; so call it there, or on every worker.

    Args:
        model, P, input_shape, dtype, backward, options: as in :func:`distdl.summary`.
        path: of the page, which is written over.
        trace: a file that :func:`distdl.trace` has written, or what it gave: measured times stand then beside predicted
            bytes. It has to be of this model, distributed, and of all workers of P.
        splits: whether other splits are ranked, which rehearses each of them.
    Returns: the report, of which ``save(path)`` writes the page once more.
    Raises: ValueError as :func:`distdl.summary`, and for a trace of something else; OSError for a trace that cannot be
        read, or a page that cannot be written.
    """
    known = P if isinstance(P, Partition) else opened()
    writes = known is None or known.comm.rank == 0
    if writes:
        _probe(Path(path))
    logs = trace.logs if isinstance(trace, Trace) else None if trace is None else read(trace)
    found = Report(gathered(model, P, input_shape, dtype, backward, splits, logs, options))
    if writes:
        found.save(path)
    return found


def _probe(path: Path) -> None:
    """Raises: OSError if no file can be written there, before anything is rehearsed."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        told = "is a folder" if path.is_dir() else "is in no folder that is there, or may not be written"
        raise OSError(f"report needs a path that it can write; {os.fspath(path)!r} {told}")
