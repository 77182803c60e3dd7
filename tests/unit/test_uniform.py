import itertools

import pytest
import torch

from distdl.geometry.boxes import balanced, slices
from distdl.tensors.uniform import _mixed, _mixed_on, mask_block, uniform_block

WHOLE = 2**64 - 1


def mixed(word):
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & WHOLE
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & WHOLE
    return word ^ (word >> 31)


def words_of(key):
    word = len(key)
    for number in (*key, 0):
        word = mixed((word + number + 0xD1B54A32D192ED03) & WHOLE)
    return word, mixed((word + 0xD1B54A32D192ED03) & WHOLE)


def test_each_number_is_the_mixed_place_and_key():
    """The same in Python's integers, which have no sign bit to lose."""
    for key in [(0, 0, 1), (2**64 - 1, 1, 2, 3), (2**63, 0, 7)]:
        first, second = words_of(key)
        block = uniform_block(key, ((0, 3), (0, 50)), (3, 50)).flatten().tolist()
        for place, number in enumerate(block):
            word = mixed(mixed((place * 0x9E3779B97F4A7C15 + first) & WHOLE) ^ second)
            assert number == (word >> 11) * 2.0**-53


@pytest.mark.parametrize("extents", [(5, 7, 3), (40, 3, 50, 11), (100_003,), (2, 90_000), (), (0, 4)])
def test_blocks_are_parts_of_the_whole(extents):
    """Also of tensors so large that they are made in pieces."""
    whole = uniform_block((1, 2), tuple((0, extent) for extent in extents), extents)
    assert whole.shape == extents
    for parts in (2, 3):
        for box in itertools.product(*[balanced(extent, parts) for extent in extents]):
            assert torch.equal(uniform_block((1, 2), box, extents), whole[slices(box)])


def test_values_and_dtypes():
    block = uniform_block((3,), ((0, 1000),), (1000,))
    assert block.dtype == torch.float64
    assert torch.equal(uniform_block((3,), ((0, 1000),), (1000,), lambda u: u < 0.5, torch.bool), block < 0.5)


def test_the_numbers_look_random_within_and_between_keys():
    """Sums of products of centred numbers, in standard deviations: of neighbours, and of two keys at one place."""
    count, scores, before = 20_000, [], torch.zeros(20_000, dtype=torch.float64)
    for key in itertools.product((0, 1, 2**40), (0, 1), (1, 2), (1, 2, 3)):
        u = uniform_block(key, ((0, count),), (count,)) - 0.5
        assert -0.5 < u.min() < -0.4990 and 0.4990 < u.max() < 0.5
        scores += [u.sum() * (12 / count) ** 0.5, (u * before).sum() * 12 / count**0.5]
        scores += [(u[lag:] * u[:-lag]).sum() * 12 / (count - lag) ** 0.5 for lag in (1, 2, 3, 64)]
        before = u
    scores = torch.stack(scores)
    assert scores.abs().max() < 4.5 and 0.8 < scores.std() < 1.2 and scores.mean().abs() < 0.3


@pytest.mark.parametrize("box", [((0, 2), (3, 9), (0, 5)), ((1, 3), (0, 9), (0, 5)), ((0, 0), (0, 9), (0, 5)), ()])
def test_a_mask_is_what_numbers_are_at_least_p(box):
    extents = (3, 9, 5)[: len(box)]
    u = uniform_block((5, 6), box, extents)
    for p in (0.0, 1e-300, 0.1, 0.5, 1 / 3, 1 - 2.0**-53, 1.0, *u.flatten().tolist()[:3]):
        assert torch.equal(mask_block((5, 6), box, extents, p), u >= p)


def test_devices_have_the_numbers_of_the_cpu():
    """Other devices compute by torch, in integers with a sign."""
    arguments = (3, 70, 5), 2**40 + 7, (350, 5, 1), (2**64 - 3, 2**63 + 11)
    assert torch.equal(_mixed_on(torch.device("cpu"))(*arguments), _mixed(*arguments))
