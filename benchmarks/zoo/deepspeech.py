"""After DeepSpeech 2 (Amodei and others, 2015): convolutions over the spectrogram, two-way GRUs, letters per frame."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

_clipped = partial(nn.Hardtanh, 0.0, 20.0)


class Recurrent(nn.Module):
    """A GRU in both directions, their outputs added, over normalised inputs."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(inputs)
        self.gru = nn.GRU(inputs, hidden, batch_first=True, bidirectional=True, bias=False)

    def forward(self, frames: Tensor) -> Tensor:
        """From (samples, frames, inputs) to (samples, frames, hidden)."""
        normed = self.norm(frames.transpose(1, 2)).transpose(1, 2)
        both: Tensor = self.gru(normed)[0]
        there, back = both.chunk(2, dim=-1)
        return there + back


class Listener(nn.Module):
    """From spectrograms to log probabilities of letters, one row for every second frame."""

    def __init__(self, bins: int, letters: int, hidden: int, layers: int, filters: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, filters, (41, 11), 2, (20, 5), bias=False),
            nn.BatchNorm2d(filters),
            _clipped(),
            nn.Conv2d(filters, filters, (21, 11), (2, 1), (10, 5), bias=False),
            nn.BatchNorm2d(filters),
            _clipped(),
        )
        heights = (bins + 3) // 4  # each convolution halves it, rounding up
        sizes = [filters * heights, *[hidden] * (layers - 1)]
        self.recurrent = nn.Sequential(*[Recurrent(size, hidden) for size in sizes])
        self.norm, self.output = nn.BatchNorm1d(hidden), nn.Linear(hidden, letters, bias=False)

    def forward(self, spectrogram: Tensor) -> Tensor:
        """From (samples, 1, bins, frames) to (samples, frames / 2, letters); letter 0 is the blank."""
        frames = self.convolutions(spectrogram).flatten(1, 2).transpose(1, 2)
        states = self.recurrent(frames)
        logits: Tensor = self.output(self.norm(states.transpose(1, 2)).transpose(1, 2))
        return logits.log_softmax(-1)


def deepspeech(
    *, bins: int = 161, letters: int = 29, hidden: int = 800, layers: int = 5, filters: int = 32
) -> nn.Module:
    """DeepSpeech-2-like net."""
    return Listener(bins, letters, hidden, layers, filters)
