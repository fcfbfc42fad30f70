"""A multi-layer perceptron and a small convolutional net, for tests and first tries."""

from __future__ import annotations

from torch import nn

from zoo.blocks import Mean2d, conv_norm


def mlp(*, channels: int = 3, image: int = 32, hidden: int = 256, classes: int = 10, dropout: float = 0.0) -> nn.Module:
    """Two hidden layers over the flattened picture."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * image * image, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, classes),
    )


def cnn(*, channels: int = 3, hidden: int = 32, classes: int = 10, dropout: float = 0.0) -> nn.Module:
    """Three convolutions with BatchNorm, each halving the picture, and a linear layer over the mean."""
    return nn.Sequential(
        conv_norm(channels, hidden),
        conv_norm(hidden, 2 * hidden, 3, 2),
        conv_norm(2 * hidden, 4 * hidden, 3, 2),
        Mean2d(),
        nn.Dropout(dropout),
        nn.Linear(4 * hidden, classes),
    )
