"""Which cases of a product `make test` runs; the others are marked, and `make sweep` runs them."""

import itertools

import pytest


def in_pairs(*values):
    """All combinations, as parameters of a test. Those of `make test` have among them each pair of two values."""
    few = min(map(len, values))
    for places in itertools.product(*map(range, map(len, values))):
        chosen = [one[place] for one, place in zip(values, places, strict=True)]
        yield pytest.param(*chosen, marks=pytest.mark.every_case if sum(places) % few else ())
