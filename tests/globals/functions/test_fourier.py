"""Fourier transforms along dims that may be split."""

import pytest
import torch
from same import Global, assert_raises_the_same, assert_same, noise

x4 = noise(2, 3, 6, 5)
z4 = torch.complex(x4, noise(2, 3, 6, 5, seed=1))
GRIDS = [(1, 1, 2, 2), (2, 1, 2, 1), (1, 1, 4, 1), (1, 3, 1, 1)]


@pytest.mark.parametrize("kind", ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"])
def test_one_dim(kind):
    transform = getattr(torch.fft, kind)
    x = x4 if kind in ("rfft", "ihfft") else z4

    def function(x):
        return (
            transform(x),
            transform(x, dim=2, norm="forward"),
            transform(x, 4, 2),
            transform(x, n=7, dim=1, norm="ortho"),
        )

    assert_same(function, Global(x), grids=GRIDS[:3])


@pytest.mark.parametrize("kind", ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"])
def test_several_dims(kind):
    several, two = getattr(torch.fft, kind + "n"), getattr(torch.fft, kind + "2")
    x = x4 if kind in ("rfft", "ihfft") else z4

    def function(x):
        return (
            several(x), several(x, dim=(-2, -1), norm="forward"), several(x, s=(7, 4), dim=(2, 3)), two(x),
            several(x, dim=[-3, -2, -1], norm="ortho"), several(x, s=[4, -1]),
        )  # fmt: skip

    assert_same(function, Global(x), grids=GRIDS)


def test_shifts():
    assert_same(
        lambda x: (torch.fft.fftshift(x, dim=[-2]), torch.fft.ifftshift(x, (2, 3)), torch.fft.fftshift(x)),
        Global(z4),
        grids=GRIDS,
    )


def test_there_and_back():
    def spectral(x):
        modes = torch.fft.rfftn(x, dim=(-2, -1), norm="forward")
        return torch.fft.irfftn(modes * 2, s=x.shape[-2:], dim=(-2, -1), norm="forward")

    assert_same(spectral, Global(x4), grids=GRIDS, twice=True)


def test_one_dim_alone():
    assert_same(lambda x: (torch.fft.fft(x), torch.fft.rfft(x)), Global(noise(7)))


WINDOW = torch.hann_window(6, dtype=torch.float64)
STFT = {
    "usual": {"window": torch.hann_window(8, dtype=torch.float64)},
    "no window": {"hop_length": 3},
    "short window": {"window": WINDOW, "win_length": 6, "hop_length": 2, "normalized": True},
    "from the start": {"window": WINDOW, "win_length": 6, "center": False, "onesided": False},
    "constant edges": {"pad_mode": "constant"},
}


@pytest.mark.filterwarnings("ignore:A window was not provided")
@pytest.mark.parametrize("options", STFT)
def test_spectrogram(options):
    def function(x):
        return torch.stft(x, 8, return_complex=True, **STFT[options])

    assert_same(function, Global(noise(3, 35)), grids=[(3, 1), (1, 4), (2, 2)])
    assert_same(function, Global(noise(35)), grids=[(3,)])


def test_spectrogram_of_complex_signals():
    signals = torch.complex(noise(2, 35), noise(2, 35, seed=1))
    window = torch.hann_window(8, dtype=torch.float64)
    assert_same(lambda x: torch.stft(x, 8, 4, window=window, return_complex=True), Global(signals), grids=[(2, 2)])


ISTFT = {
    "usual": {"window": torch.hann_window(8, dtype=torch.float64)},
    "no window": {"hop_length": 3},
    "short window": {"window": WINDOW + 0.1, "win_length": 6, "hop_length": 2, "normalized": True},
    "steps that do not divide": {"window": torch.hamming_window(8, dtype=torch.float64), "hop_length": 3},
    "from the start": {"window": torch.hamming_window(8, dtype=torch.float64), "center": False},
    "a part": {"window": torch.hann_window(8, dtype=torch.float64), "length": 13},
    "more than there is": {"window": torch.hamming_window(8, dtype=torch.float64), "length": 60, "center": False},
    "both sides": {"onesided": False},
    "complex": {"window": torch.hann_window(8, dtype=torch.float64), "return_complex": True, "onesided": False},
}


@pytest.mark.filterwarnings("ignore:A window was not provided", "ignore:The length of signal is shorter")
@pytest.mark.parametrize("options", ISTFT)
def test_signals_of_spectrograms(options):
    def function(x, window):
        return torch.istft(x, 8, **{**ISTFT[options], "window": window})

    window = ISTFT[options].get("window", torch.ones(8, dtype=torch.float64))
    modes = 5 if ISTFT[options].get("onesided", True) else 8
    # (of the constant, and of the highest, the imaginary part counts for nothing)
    x = torch.complex(noise(3, modes, 11), noise(3, modes, 11, seed=1))
    assert_same(function, Global(x), window, grids=[(3, 1, 1), (1, 2, 2), (1, 1, 4)], twice=options == "usual")
    assert_same(function, Global(x[0]), window, grids=[(2, 2), (1, 4)])


def test_spectrograms_and_back():
    window = torch.hann_window(8, dtype=torch.float64)

    def function(x):
        modes = torch.stft(x, 8, 2, window=window, return_complex=True)
        return (modes * 2).istft(n_fft=8, hop_length=2, window=window, length=x.shape[-1])

    assert_same(function, Global(noise(2, 35)), grids=[(2, 2), (1, 3)])
    assert_same(function, Global(noise(2, 35).float()), grids=[(2, 2)], tolerance=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"center": False, "window": torch.hann_window(8, dtype=torch.float64)},
        {"hop_length": 9, "window": torch.ones(8)},
        {"onesided": False, "window": torch.ones(8)},
        {"window": torch.ones(7)},
        {"hop_length": 0, "window": torch.ones(8)},
        {"length": 0, "window": torch.ones(8)},
    ],
)
def test_signals_that_torch_refuses(options):
    x = torch.complex(noise(3, 5, 11), noise(3, 5, 11, seed=1))
    assert_raises_the_same(lambda x: torch.istft(x, 8, **options), x)
