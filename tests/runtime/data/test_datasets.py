"""Datasets from scikit-learn, from files, and synthetic."""

from __future__ import annotations

import gzip
import io
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import carpool
from carpool.core.errors import InputError
from carpool.runtime.data.datasets import (
    TensorData,
    accuracy,
    characters,
    cifar10,
    digits,
    fashion_mnist,
    synthetic,
    words,
)
from carpool.runtime.engine.determinism import permutation


def test_digits() -> None:
    data = carpool.datasets.digits()
    assert (len(data.train), len(data.test)) == (1438, 359)
    images, labels = data.train.batch(torch.tensor([0, 5, 1]))
    assert images.shape == (3, 1, 8, 8)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    every = torch.cat([data.train.tensors[0], data.test.tensors[0]])
    assert (float(every.min()), float(every.max())) == (0.0, 1.0)
    assert torch.bincount(data.test.tensors[1], minlength=10).min() > 20
    assert len(digits(0.5).test) == 898
    with pytest.raises(InputError, match="test_share is 1;"):
        digits(1)


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    pixels, labels = load_digits(return_X_y=True)
    mixed = permutation(len(labels), key=0)
    split = digits(0.2)
    images, classes = (torch.cat(pair) for pair in zip(split.train.tensors, split.test.tensors, strict=True))
    assert torch.equal(images.flatten(1) * 16, torch.from_numpy(pixels[mixed]).float())
    assert classes.tolist() == labels[mixed].tolist()


def test_digits_are_read_without_importing_scikit_learn() -> None:
    script = "import sys, carpool; carpool.datasets.digits(); assert 'sklearn' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_rows_and_batches_agree() -> None:
    data = TensorData(torch.arange(6).view(6, 1), torch.arange(6), finish=lambda rows: (rows[0] * 10, rows[1]))
    assert [row.tolist() for row in data[4]] == [[40], 4]
    assert [row.tolist() for row in data.batch(torch.tensor([4, 0]))] == [[[40], [0]], [4, 0]]
    assert [labels.tolist() for _, labels in data.batches(4)] == [[0, 1, 2, 3], [4, 5]]
    assert len(data.first(2)) == 2
    assert data.to("meta").batch(torch.tensor([1]))[0].device.type == "meta"
    with pytest.raises(IndexError, match=r"sample 6;.* 6"):
        data[6]
    with pytest.raises(InputError, match=r"\[2, 3\] samples"):
        TensorData(torch.zeros(2), torch.zeros(3))


def test_accuracy() -> None:
    data = TensorData(torch.eye(4), torch.tensor([0, 1, 2, 0]))
    model = nn.Linear(4, 4, bias=False)
    nn.init.eye_(model.weight)
    assert accuracy(model, data, batch_size=3) == 0.75


def test_synthetic_data_is_reproducible_and_learnable() -> None:
    data = synthetic((2, 3), classes=3, size=60, test_size=30, seed=1)
    assert data.train.batch(torch.tensor([0, 1]))[0].shape == (2, 2, 3)
    assert (len(data.train), len(data.test)) == (60, 30)
    assert torch.equal(data.train.tensors[0], synthetic((2, 3), 3, 60, 30, seed=1).train.tensors[0])
    assert not torch.equal(data.train.tensors[0], synthetic((2, 3), 3, 60, 30, seed=2).train.tensors[0])
    wide = synthetic((200,), classes=3, size=300)
    inputs, labels = wide.train.tensors
    centres = torch.stack([inputs[labels == k].mean(0) for k in range(3)])
    test_inputs, test_labels = wide.test.tensors
    assert (torch.cdist(test_inputs, centres).argmin(1) == test_labels).float().mean() > 0.95
    with pytest.raises(InputError, match="size is 0"):
        synthetic(size=0)


def write_idx(path: Path, array: np.ndarray[Any, Any], packed: bool = True) -> None:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    content = head + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if packed else content)


def test_fashion_mnist(tmp_path: Path) -> None:
    pixels = np.arange(5 * 28 * 28).reshape(5, 28, 28) % 256
    for name, packed in (("train", True), ("t10k", False)):
        end = ".gz" if packed else ""
        write_idx(tmp_path / f"{name}-images-idx3-ubyte{end}", pixels, packed)
        write_idx(tmp_path / f"{name}-labels-idx1-ubyte{end}", np.array([3, 1, 4, 1, 5]), packed)
    data = fashion_mnist(tmp_path)
    images, labels = data.train.batch(torch.tensor([2, 0]))
    assert labels.tolist() == [4, 3]
    assert images.shape == (2, 1, 28, 28)
    assert torch.allclose(images[1, 0, 0, :3], (torch.tensor([0.0, 1.0, 2.0]) / 255 - 0.2860) / 0.3530)
    assert len(data.test) == 5

    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1]) + struct.pack(">I", 9) + b"abc")
    with pytest.raises(InputError, match=r"t10k-labels-idx1-ubyte: .* 3 values.* 9"):
        fashion_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"<html>")
    with pytest.raises(InputError, match=r"IDX file.*b'<htm'"):
        fashion_mnist(tmp_path)
    with pytest.raises(InputError, match=r"train-images-idx3-ubyte\.gz"):
        fashion_mnist(tmp_path / "nowhere")


def jpeg_file(path: Path) -> list[np.ndarray[Any, Any]]:
    """An npz file of three small JPEG images."""
    image = pytest.importorskip("PIL.Image")
    images_in = [np.full((32, 32, 3), shade, dtype=np.uint8) for shade in (0, 100, 250)]
    files = []
    for image_in in images_in:
        buffer = io.BytesIO()
        image.fromarray(image_in).save(buffer, "JPEG", quality=95)
        files.append(buffer.getvalue())
    common = len(next(iter(files)))
    while len({file[:common] for file in files}) > 1:
        common -= 1
    bodies = [file[common:-2] for file in files]
    offsets = np.cumsum([0, *[len(body) for body in bodies]])
    raw = np.frombuffer(b"".join(bodies), dtype=np.uint8)
    arrays: dict[str, Any] = {"jpeg_header": np.frombuffer(files[0][:common], dtype=np.uint8)}
    for name in ("train", "test"):
        arrays |= {f"{name}_bytes": raw, f"{name}_offsets": offsets, f"{name}_labels": np.array([7, 8, 9])}
    np.savez(path, **arrays)
    return images_in


def test_cifar10_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images_in = jpeg_file(tmp_path / "c.npz")
    data = cifar10(tmp_path / "c.npz", cache=tmp_path / "cache")
    images, labels = data.train.tensors
    assert labels.tolist() == [7, 8, 9]
    assert images.shape == (3, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert abs(images[:, 0, 5, 5].float() - torch.tensor([float(p[0, 0, 0]) for p in images_in])).max() <= 2
    batch = data.test.batch(torch.tensor([2]))[0]
    assert batch[0, 0, 0, 0] == pytest.approx((250 / 255 - 0.4914) / 0.2470, abs=0.05)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert torch.equal(cifar10(tmp_path / "c.npz", cache=tmp_path / "cache").train.tensors[0], images)
    with pytest.raises(InputError, match="pillow"):
        cifar10(tmp_path / "c.npz", cache=tmp_path / "other")


def test_wrong_cifar10_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no\.npz: file not found"):
        cifar10(tmp_path / "no.npz")
    np.savez(tmp_path / "x.npz", train_bytes=np.zeros(1))
    with pytest.raises(InputError, match=r"x\.npz: .*jpeg_header, train_labels, train_offsets"):
        cifar10(tmp_path / "x.npz", cache=tmp_path)


def test_text_by_character(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abcab" * 20)
    corpus = characters(path, length=4, test_share=0.2)
    assert corpus.vocabulary == ("a", "b", "c")
    assert corpus.num_tokens == 3
    inputs, targets = corpus.train.batch(torch.tensor([0, 1]))
    assert inputs.tolist() == [[0, 1, 2, 0], [1, 0, 1, 2]]
    assert targets.tolist() == [[1, 2, 0, 1], [0, 1, 2, 0]]
    assert len(corpus.test) == 4
    with pytest.raises(InputError, match=r"a\.txt: 100 tokens; windows of 64"):
        characters(path)


def test_text_by_word(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("to be or not to be\n\nthat is it\n" * 10)
    corpus = words(path, length=3)
    assert corpus.vocabulary == ("<eos>", "be", "to", "is", "it", "not", "or", "that")
    assert corpus.train.tensors[0][0].tolist() == [2, 1, 6]
    few = words(path, length=3, most=4)
    assert few.vocabulary == ("<unk>", "<eos>", "be", "to")
    assert few.train.tensors[0][0].tolist() == [3, 2, 0]


def test_wrong_text_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no\.txt: .*No such file"):
        characters(tmp_path / "no.txt")
    (tmp_path / "b.txt").write_bytes(b"abc\xff")
    with pytest.raises(InputError, match=r"UTF-8.* at byte 3"):
        words(tmp_path / "b.txt")
    (tmp_path / "c.txt").write_text("abc")
    with pytest.raises(InputError, match="length is 0, test_share"):
        characters(tmp_path / "c.txt", length=0)


def test_real_text(shared_data: Path) -> None:
    path = shared_data / "tinyshakespeare" / "input.txt"
    if not path.is_file():
        pytest.skip(f"no {path}")
    corpus = characters(path)
    assert corpus.num_tokens == 65
    assert len(corpus.train) == 15685
