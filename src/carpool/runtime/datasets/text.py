"""Text as sequences of characters or words, to predict the next one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from carpool.core.errors import InputError
from carpool.runtime.datasets.tensors import Split, TensorData

_UNKNOWN = "<unk>"


@dataclass(frozen=True, slots=True)
class Corpus(Split):
    """A text in windows: each sample is ``length`` tokens and the same tokens moved by one."""

    vocabulary: tuple[str, ...]  # token number to token

    @property
    def num_tokens(self) -> int:
        """How many different tokens there are."""
        return len(self.vocabulary)


def characters(path: str | Path, length: int = 64, test_share: float = 0.1) -> Corpus:
    """A text file, character by character; the last ``test_share`` of it is the test data."""
    text = _read(path)
    return _corpus(list(text), tuple(sorted(set(text))), length, test_share, str(path))


def words(path: str | Path, length: int = 35, test_share: float = 0.1, most: int = 0) -> Corpus:
    """A text file, word by word (lines end in ``<eos>``); with ``most``, only the most frequent words have a number."""
    tokens = [word for line in _read(path).splitlines() if line.strip() for word in (*line.split(), "<eos>")]
    counts = Counter(tokens)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    if most and len(ranked) > most:
        ranked = [_UNKNOWN, *[word for word in ranked if word != _UNKNOWN][: most - 1]]
    return _corpus(tokens, tuple(ranked), length, test_share, str(path))


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"the text cannot be read: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise InputError(f"no UTF-8 text: {error.reason} at byte {error.start}", where=str(path)) from error


def _corpus(tokens: list[str], vocabulary: tuple[str, ...], length: int, test_share: float, where: str) -> Corpus:
    if length < 1 or not 0 < test_share < 1:
        raise InputError(f"length is {length}, test_share {test_share}; they must be at least 1 and between 0 and 1")
    numbers = {token: number for number, token in enumerate(vocabulary)}
    unknown = numbers.get(_UNKNOWN, 0)
    stream = torch.tensor([numbers.get(token, unknown) for token in tokens])
    cut = len(stream) - int(len(stream) * test_share)
    if min(cut, len(stream) - cut) <= length:
        raise InputError(
            f"holds {len(tokens)} tokens; windows of {length} need more for training and test",
            where=where,
            way_out="Lower length or bring more text.",
        )
    return Corpus(_windows(stream[:cut], length), _windows(stream[cut:], length), vocabulary)


def _windows(stream: Tensor, length: int) -> TensorData:
    count = (len(stream) - 1) // length
    inputs = stream[: count * length].view(count, length)
    return TensorData(inputs, stream[1 : count * length + 1].view(count, length))
