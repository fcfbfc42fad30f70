"""Datasets held in memory: tensors, digits, Fashion-MNIST, CIFAR-10, text and synthetic data."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import itertools
import math
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from carpool.core.errors import InputError
from carpool.runtime.engine.determinism import permutation, uniforms

Finish = Callable[[tuple[Tensor, ...]], Any]


class TensorData:
    """Samples as rows of tensors, read a batch at a time.

    ``finish`` converts a batch of rows for the model, for example bytes to floats, so that images stay small in memory.
    """

    def __init__(self, *tensors: Tensor, finish: Finish | None = None) -> None:
        sizes = [len(tensor) for tensor in tensors]
        if not sizes or len(set(sizes)) > 1:
            raise InputError(f"the tensors of a dataset have {sizes} samples; the numbers must be equal")
        self.tensors = tensors
        self.finish = finish

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, sample: int) -> Any:
        rows = tuple(tensor[sample : sample + 1] for tensor in self.tensors)
        if sample < 0 or not len(rows[0]):
            raise IndexError(f"sample {sample}; the dataset has {len(self)}")
        batch = self.finish(rows) if self.finish else rows
        return type(batch)([row[0] for row in batch])

    def batch(self, samples: Tensor) -> Any:
        """The samples with these indices, as one batch."""
        rows = tuple(tensor.index_select(0, samples.to(tensor.device)) for tensor in self.tensors)
        return self.finish(rows) if self.finish else rows

    def batches(self, size: int) -> Iterator[Any]:
        """All samples in order, as batches."""
        for start in range(0, len(self), size):
            yield self.batch(torch.arange(start, min(start + size, len(self))))

    def to(self, device: str | torch.device) -> TensorData:
        return TensorData(*[tensor.to(device) for tensor in self.tensors], finish=self.finish)

    def first(self, count: int) -> TensorData:
        return TensorData(*[tensor[:count] for tensor in self.tensors], finish=self.finish)


@dataclass(frozen=True, slots=True)
class Split:
    """Training and test data."""

    train: TensorData
    test: TensorData


def accuracy(model: nn.Module, data: TensorData, batch_size: int = 1024) -> float:
    """The fraction of samples whose largest output is at their label."""
    device = next(model.parameters()).device
    correct = 0
    for inputs, labels in data.batches(batch_size):
        correct += int((model(inputs.to(device)).argmax(-1) == labels.to(device)).sum())
    return correct / len(data)


def scaled_images(mean: tuple[float, ...], std: tuple[float, ...]) -> Finish:
    """Make a ``finish`` function: bytes to floats in [0, 1], then normalized by mean and std of each channel."""
    shift, width = (torch.tensor(values).view(1, -1, 1, 1) for values in (mean, std))

    def finish(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        images, *rest = rows
        floats = images.float().div_(255.0)
        return (floats.sub_(shift.to(floats.device)).div_(width.to(floats.device)), *rest)

    return finish


def synthetic(
    shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, size: int = 1024, test_size: int = 0, seed: int = 0
) -> Split:
    """Noise around one random centre per class: inputs of ``shape``, labels below ``classes``."""
    if size < 1 or classes < 1 or test_size < 0:
        raise InputError(f"size is {size}, classes {classes}, test_size {test_size}; they must be positive")
    width = int(np.prod(shape))
    total = size + (test_size or max(1, size // 5))
    labels = torch.arange(total) % classes
    centres = torch.from_numpy(uniforms(2 * seed, np.arange(classes, dtype=np.int64), range(width))) - 0.5
    noise = torch.from_numpy(uniforms(2 * seed + 1, np.arange(total, dtype=np.int64), range(width))) - 0.5
    inputs = (centres[labels] + 2.0 * noise).view(total, *shape)
    return Split(TensorData(inputs[:size], labels[:size]), TensorData(inputs[size:], labels[size:]))


_IDX_BYTES = 0x08  # the code of unsigned bytes in the IDX format
_CIFAR_SHAPE = (3, 32, 32)


def digits(test_share: float = 0.2) -> Split:
    """1,797 handwritten digits of 8×8 pixels (1×8×8 floats in [0, 1], label 0–9) that ship with scikit-learn.

    The order is a fixed permutation; the last ``test_share`` of the samples are the test data.
    """
    if not 0 < test_share < 1:
        raise InputError(f"test_share is {test_share}; it must be between 0 and 1")
    rows = _read_digits()
    mixed = rows[permutation(len(rows), key=0)]
    images = torch.from_numpy(mixed[:, :-1].astype(np.float32) / 16.0).view(-1, 1, 8, 8)
    classes = torch.from_numpy(mixed[:, -1].astype(np.int64))
    num_train = len(rows) - round(len(rows) * test_share)
    return Split(
        TensorData(images[:num_train], classes[:num_train]), TensorData(images[num_train:], classes[num_train:])
    )


def fashion_mnist(folder: str | Path) -> Split:
    """Fashion-MNIST (1×28×28, ten classes) from its four IDX files, gzipped or not.

    Debian's package ``dataset-fashion-mnist`` installs them in ``/usr/share/dataset-fashion-mnist``.
    """
    parts = []
    for name in ("train", "t10k"):
        images = _read_idx(Path(folder), f"{name}-images-idx3-ubyte", 3)
        labels = _read_idx(Path(folder), f"{name}-labels-idx1-ubyte", 1)
        finish = scaled_images((0.2860,), (0.3530,))
        parts.append(TensorData(images.unsqueeze(1), labels.long(), finish=finish))
    return Split(*parts)


def cifar10(path: str | Path, cache: str | Path | None = None) -> Split:
    """CIFAR-10 (3×32×32, ten classes) from an npz file of JPEG images; needs pillow.

    Image i of ``train`` is the JPEG ``jpeg_header`` + ``train_bytes[train_offsets[i]:train_offsets[i+1]]`` + FF D9, its
    class ``train_labels[i]``; ``test`` likewise. Decoding takes about 20 s once: the pixels are cached in ``cache``
    (by default ``~/.cache/carpool``).
    """
    source = Path(path)
    if not source.is_file():
        raise InputError("file not found", where=str(source), way_out="Give the path of the npz file with JPEG images.")
    cached = _cache_file(source, cache)
    if not cached.is_file():
        _decode_cifar(source, cached)
    with np.load(cached) as arrays:
        pixels = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    finish = scaled_images((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    train, test = (TensorData(pixels[f"{n}_images"], pixels[f"{n}_labels"], finish=finish) for n in ("train", "test"))
    return Split(train, test)


def _read_digits() -> NDArray[np.uint8]:
    """Rows of 64 pixels and a label, from scikit-learn's data file: importing scikit-learn takes a second."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise InputError("digits ship with scikit-learn, which is not installed", way_out="pip install scikit-learn")
    path = Path(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if not path.is_file():
        raise InputError("file not found", where=str(path), way_out="Install a scikit-learn that ships the digits.")
    with gzip.open(path, "rt", encoding="ascii") as file:
        text = file.read()
    return np.array(text.replace("\n", ",").rstrip(",").split(","), dtype=np.uint8).reshape(-1, 65)


def _read_idx(folder: Path, name: str, dims: int) -> Tensor:
    """Read a file of bytes in IDX format: type, number of dimensions, sizes, values."""
    for path, open_file in ((folder / f"{name}.gz", gzip.open), (folder / name, open)):
        if path.is_file():
            with open_file(path, "rb") as file:
                content = file.read()
            break
    else:
        raise InputError(
            f"{name} or {name}.gz not found", where=str(folder), way_out="Give the folder of the IDX files."
        )
    head = 4 + 4 * dims
    if len(content) < head or content[:4] != bytes([0, 0, _IDX_BYTES, dims]):
        raise InputError(
            f"not an IDX file of bytes with {dims} dimensions: starts with {content[:4]!r}", where=str(path)
        )
    shape = struct.unpack(f">{dims}I", content[4:head])
    if len(content) - head != math.prod(shape):
        raise InputError(
            f"has {len(content) - head} values; the header {shape} needs {math.prod(shape)}", where=str(path)
        )
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8, offset=head).reshape(shape).copy())


def _cache_file(source: Path, cache: str | Path | None) -> Path:
    """The cache file of a source, named after its path, size and modification time."""
    folder = Path(cache) if cache else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "carpool"
    stat = source.stat()
    key = hashlib.sha256(f"{source.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    return folder / f"cifar10-{key}.npz"


def _decode_cifar(source: Path, cached: Path) -> None:
    arrays: dict[str, NDArray[np.generic]] = {}
    with np.load(source) as packed:
        missing = {"jpeg_header", "train_bytes", "train_offsets", "train_labels"} - set(packed.files)
        if missing:
            raise InputError(f"arrays missing: {', '.join(sorted(missing))}", where=str(source))
        header = packed["jpeg_header"].tobytes()
        for name in ("train", "test"):
            raw, offsets = packed[f"{name}_bytes"].tobytes(), packed[f"{name}_offsets"]
            arrays[f"{name}_images"] = _decode_jpegs(header, raw, offsets)
            arrays[f"{name}_labels"] = packed[f"{name}_labels"].astype(np.int64)
    cached.parent.mkdir(parents=True, exist_ok=True)
    draft = cached.with_suffix(f".{os.getpid()}.part.npz")
    np.savez(draft, **arrays)  # type: ignore[arg-type]
    draft.replace(cached)


def _decode_jpegs(header: bytes, raw: bytes, offsets: NDArray[np.generic]) -> NDArray[np.uint8]:
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError(
            "decoding JPEG images needs pillow, which is not installed", way_out="Install it with: pip install pillow"
        ) from error
    bounds = [int(offset) for offset in offsets.tolist()]
    images = np.empty((len(bounds) - 1, *_CIFAR_SHAPE), dtype=np.uint8)
    for index, (start, end) in enumerate(itertools.pairwise(bounds)):
        with Image.open(io.BytesIO(header + raw[start:end] + b"\xff\xd9")) as image:
            images[index] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    return images


_UNKNOWN = "<unk>"


@dataclass(frozen=True, slots=True)
class Corpus(Split):
    """A text in windows: each sample is ``length`` tokens and the same tokens shifted by one."""

    vocabulary: tuple[str, ...]  # tokens by index

    @property
    def num_tokens(self) -> int:
        return len(self.vocabulary)


def characters(path: str | Path, length: int = 64, test_share: float = 0.1) -> Corpus:
    """A text file, character by character; the last ``test_share`` of it is the test data."""
    text = _read(path)
    return _corpus(list(text), tuple(sorted(set(text))), length, test_share, str(path))


def words(path: str | Path, length: int = 35, test_share: float = 0.1, most: int = 0) -> Corpus:
    """A text file, word by word (lines end in ``<eos>``); ``most`` limits the vocabulary to the most frequent words."""
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
        raise InputError(f"cannot read the text: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text: {error.reason} at byte {error.start}", where=str(path)) from error


def _corpus(tokens: list[str], vocabulary: tuple[str, ...], length: int, test_share: float, where: str) -> Corpus:
    if length < 1 or not 0 < test_share < 1:
        raise InputError(f"length is {length}, test_share {test_share}; they must be at least 1 and between 0 and 1")
    numbers = {token: number for number, token in enumerate(vocabulary)}
    unknown = numbers.get(_UNKNOWN, 0)
    stream = torch.tensor([numbers.get(token, unknown) for token in tokens])
    cut = len(stream) - int(len(stream) * test_share)
    if min(cut, len(stream) - cut) <= length:
        raise InputError(
            f"{len(tokens)} tokens; windows of {length} need more for training and test data",
            where=where,
            way_out="Lower length or use more text.",
        )
    return Corpus(_windows(stream[:cut], length), _windows(stream[cut:], length), vocabulary)


def _windows(stream: Tensor, length: int) -> TensorData:
    count = (len(stream) - 1) // length
    inputs = stream[: count * length].view(count, length)
    return TensorData(inputs, stream[1 : count * length + 1].view(count, length))


__all__ = [
    "Corpus",
    "Split",
    "TensorData",
    "accuracy",
    "characters",
    "cifar10",
    "digits",
    "fashion_mnist",
    "synthetic",
    "words",
]
