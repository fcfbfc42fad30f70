"""Pictures: digits from scikit-learn, Fashion-MNIST and CIFAR-10 from files the user has."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import itertools
import math
import os
import struct
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carpool.core.errors import InputError
from carpool.runtime.chance import permutation
from carpool.runtime.datasets.tensors import Split, TensorData, scaled_images

_IDX_BYTES = 0x08  # the code of unsigned bytes in the IDX format
_CIFAR_SHAPE = (3, 32, 32)


def digits(test_share: float = 0.2) -> Split:
    """1,797 handwritten digits of 8×8 pixels (1×8×8 floats in [0, 1], label 0–9) that ship inside scikit-learn.

    The samples are mixed once, always alike; the last ``test_share`` of them are the test data.
    """
    if not 0 < test_share < 1:
        raise InputError(f"test_share is {test_share}; it must lie between 0 and 1")
    rows = _read_digits()
    mixed = rows[permutation(len(rows), key=0)]
    images = torch.from_numpy(mixed[:, :-1].astype(np.float32) / 16.0).view(-1, 1, 8, 8)
    classes = torch.from_numpy(mixed[:, -1].astype(np.int64))
    num_train = len(rows) - round(len(rows) * test_share)
    return Split(
        TensorData(images[:num_train], classes[:num_train]), TensorData(images[num_train:], classes[num_train:])
    )


def fashion_mnist(folder: str | Path) -> Split:
    """Fashion-MNIST (1×28×28, ten classes) from its four IDX files, packed or not.

    Debian's package ``dataset-fashion-mnist`` puts them into ``/usr/share/dataset-fashion-mnist``.
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
    class ``train_labels[i]``; ``test`` likewise. Decoding takes some 20 s and is done once: the pixels are kept in
    ``cache`` (by default ``~/.cache/carpool``).
    """
    source = Path(path)
    if not source.is_file():
        raise InputError("there is no such file", where=str(source), way_out="Name the npz file with the JPEG images.")
    kept = _cache_file(source, cache)
    if not kept.is_file():
        _decode_cifar(source, kept)
    with np.load(kept) as arrays:
        pixels = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    finish = scaled_images((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    train, test = (TensorData(pixels[f"{n}_images"], pixels[f"{n}_labels"], finish=finish) for n in ("train", "test"))
    return Split(train, test)


def _read_digits() -> NDArray[np.uint8]:
    """Rows of 64 pixels and a label, from scikit-learn's own file: importing scikit-learn takes a worker a second."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise InputError("digits ship inside scikit-learn, which is not installed", way_out="pip install scikit-learn")
    path = Path(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if not path.is_file():
        raise InputError("this scikit-learn ships no digits", where=str(path), way_out="Install another version of it.")
    with gzip.open(path, "rt", encoding="ascii") as file:
        text = file.read()
    return np.array(text.replace("\n", ",").rstrip(",").split(","), dtype=np.uint8).reshape(-1, 65)


def _read_idx(folder: Path, name: str, dims: int) -> Tensor:
    """Read a file of bytes in IDX format: type, number of dimensions, their sizes, the values."""
    for path, open_file in ((folder / f"{name}.gz", gzip.open), (folder / name, open)):
        if path.is_file():
            with open_file(path, "rb") as file:
                content = file.read()
            break
    else:
        raise InputError(
            f"holds no {name} or {name}.gz", where=str(folder), way_out="Name the folder of the IDX files."
        )
    head = 4 + 4 * dims
    if len(content) < head or content[:4] != bytes([0, 0, _IDX_BYTES, dims]):
        raise InputError(f"no IDX file of bytes in {dims} dimensions; it begins with {content[:4]!r}", where=str(path))
    shape = struct.unpack(f">{dims}I", content[4:head])
    if len(content) - head != math.prod(shape):
        raise InputError(
            f"holds {len(content) - head} values; {shape} in its header asks {math.prod(shape)}", where=str(path)
        )
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8, offset=head).reshape(shape).copy())


def _cache_file(source: Path, cache: str | Path | None) -> Path:
    """Where the pixels of a source are kept: another size or date of the source is another file."""
    folder = Path(cache) if cache else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "carpool"
    stat = source.stat()
    key = hashlib.sha256(f"{source.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    return folder / f"cifar10-{key}.npz"


def _decode_cifar(source: Path, kept: Path) -> None:
    arrays: dict[str, NDArray[np.generic]] = {}
    with np.load(source) as packed:
        missing = {"jpeg_header", "train_bytes", "train_offsets", "train_labels"} - set(packed.files)
        if missing:
            raise InputError(f"holds no {', '.join(sorted(missing))}", where=str(source))
        header = packed["jpeg_header"].tobytes()
        for name in ("train", "test"):
            raw, offsets = packed[f"{name}_bytes"].tobytes(), packed[f"{name}_offsets"]
            arrays[f"{name}_images"] = _decode_jpegs(header, raw, offsets)
            arrays[f"{name}_labels"] = packed[f"{name}_labels"].astype(np.int64)
    kept.parent.mkdir(parents=True, exist_ok=True)
    draft = kept.with_suffix(f".{os.getpid()}.part.npz")
    np.savez(draft, **arrays)  # type: ignore[arg-type]
    draft.replace(kept)


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
