"""The contract of a back-end: one suite that runs on all of them, on one worker or on four.

Every function whose name begins with ``check`` is run by all workers together, in the order in which they stand in the
files of this folder, and the files in the order below.

Attributes:
    CHECKS: the functions by their names.
"""

from contract import (
    changes,
    checkpoints,
    differentiation,
    errors,
    layers,
    messages,
    models,
    numbers,
    primitives,
    worlds,
)


def collect(*files):
    """The checks of some modules, by name. A name that comes twice would hide a check: it is an error."""
    found = [(name, function) for file in files for name, function in vars(file).items() if name.startswith("check_")]
    assert len(dict(found)) == len(found), "two checks have the same name"
    return dict(found)


CHECKS = collect(worlds, messages, primitives, changes, errors, differentiation, layers, models, numbers, checkpoints)
