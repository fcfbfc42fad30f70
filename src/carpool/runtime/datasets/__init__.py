"""Real and made-up data for trainings, held in memory and read by sample numbers."""

from __future__ import annotations

from carpool.runtime.datasets.images import cifar10, digits, fashion_mnist
from carpool.runtime.datasets.synthetic import synthetic
from carpool.runtime.datasets.tensors import Split, TensorData, accuracy
from carpool.runtime.datasets.text import Corpus, characters, words

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
