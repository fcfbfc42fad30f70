"""Connectionist temporal classification (Graves and others, 2006) with fixed shapes and sums in a fixed order.

Torch's own has no deterministic gradient on a GPU and reads the lengths on the host, which a captured graph cannot.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_NEVER = -1e30  # the logarithm of a probability of nothing; finite, so that gradients stay numbers


def ctc_loss(log_probs: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    """Minus the log probability of each sample's labels, over all ways to spread them over the frames.

    ``log_probs`` is (samples, frames, symbols) with symbol 0 the blank, ``labels`` (samples, most labels) and
    ``lengths`` (samples) how many of them count. The recursion runs over the labels with a blank around each:
    α_t(s) = p_t(s) · (α_{t−1}(s) + α_{t−1}(s−1) + α_{t−1}(s−2) where s is no blank and not the label before).
    """
    count, most = labels.shape
    blanks = torch.zeros_like(labels)
    spread = pad(torch.stack((blanks, labels), dim=-1).view(count, 2 * most), (0, 1))
    skips = spread != pad(spread[:, :-2], (2, 0))  # never true for a blank: two before it stands a blank too
    emitted = log_probs.gather(2, spread[:, None, :].expand(-1, log_probs.shape[1], -1))
    first = torch.arange(2 * most + 1, device=labels.device) < 2
    alpha = torch.where(first, emitted[:, 0], _NEVER)
    for frame in range(1, log_probs.shape[1]):
        one = pad(alpha[:, :-1], (1, 0), value=_NEVER)
        two = torch.where(skips, pad(alpha[:, :-2], (2, 0), value=_NEVER), _NEVER)
        alpha = torch.logaddexp(torch.logaddexp(alpha, one), two) + emitted[:, frame]
    blank, label = (alpha.gather(1, ends.clamp(min=0)[:, None]) for ends in (2 * lengths, 2 * lengths - 1))
    return -torch.logaddexp(blank, torch.where(lengths[:, None] > 0, label, _NEVER)).squeeze(1)
