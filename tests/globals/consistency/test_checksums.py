"""Checksums, bits and samples of tensors, which workers compare."""

import subprocess
import sys

import pytest
import torch

from distdl.globals.consistency.checksums import Sample, bits_of, digest


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.int32, torch.float16, torch.int64]
)
def test_samples_of_all_dtypes(dtype):
    whole = torch.arange(3 * 7 * 250).reshape(3, 7, 250)
    for x in (whole.to(dtype), whole.to(dtype).transpose(0, 2), whole.to(dtype)[:, ::2], whole[0, 0, 3].to(dtype)):
        one, other = Sample.of(x), Sample.of(~x if dtype is torch.bool else x + 256)
        assert one.values.numel() < 300 and digest(one) == digest(Sample.of(x.clone()))
        assert digest(one) != digest(other)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.complex128, torch.int64, torch.bool]
)
def test_bits_follow_from_all_of_a_tensor(dtype):
    one = torch.arange(-3, 3).reshape(2, 3).to(dtype)
    other = one.clone()
    other[1, 0] = 7 if dtype is not torch.bool else ~other[1, 0]
    assert torch.equal(bits_of(one), bits_of(one.clone())) and bits_of(one).numel() == 16
    assert not torch.equal(bits_of(one), bits_of(other))
    assert not torch.equal(bits_of(one, number=1 << 60), bits_of(one))


@pytest.mark.parametrize("count", [512, 5000, 2**16, 2**18 + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bits_follow_from_places_signs_and_exponents(count, dtype):
    one = torch.linspace(-1, 1, count, dtype=torch.float64).to(dtype)
    parts = [one * 2, -one, one.flip(0), one.roll(1), one.clone(), one.clone()]
    parts[-1][-1] += 1
    parts[-2][:2] = parts[-2][:2] * 4
    for other in parts:
        assert not torch.equal(bits_of(one), bits_of(other))


def test_bits_follow_from_nothing_that_differs_between_processes():
    text = (
        "import torch; from distdl.globals.consistency.checksums import Sample, bits_of, digest; "
        "print(bits_of(torch.ones(3), digest(Sample.of(torch.ones(3)))).tolist())"
    )
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(bits_of(torch.ones(3), digest(Sample.of(torch.ones(3)))).tolist())
