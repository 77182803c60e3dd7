"""The cases that are not left out of a product."""

import itertools

import pytest
from covering import in_pairs


@pytest.mark.parametrize("lengths", [(9, 5, 3), (2, 5, 3, 2), (19, 4, 3), (1, 4), (3, 3, 3)])
def test_each_pair_of_values_is_in_one_of_them(lengths):
    values = [[(place, value) for value in range(length)] for place, length in enumerate(lengths)]
    cases = list(in_pairs(*values))
    assert {case.values for case in cases} == set(itertools.product(*values))
    kept = [case.values for case in cases if not case.marks]
    found = {pair for case in kept for pair in itertools.combinations(case, 2)}
    assert found == {pair for two in itertools.combinations(values, 2) for pair in itertools.product(*two)}
    assert len(kept) <= -(-len(cases) // min(lengths))
