"""Question answering: a small BERT that marks the answer in a text.

    carpool run examples/jobs.toml

Give a file in SQuAD's layout, `args = { path = "train-v1.1.json" }`; without one, little stories are made up here. The
net starts from nothing, so on real questions expect it to learn where answers stand and not yet to understand them: for
that, load pretrained weights into `model`.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import carpool

PADDING, BEGIN, SEPARATOR, UNKNOWN = range(4)
WORD = re.compile(r"\w+|[^\w\s]")


class Question(NamedTuple):
    """A question, the text that answers it, and the words [begin, end] of the text that are the answer."""

    asked: list[str]
    text: list[str]
    begin: int
    end: int


class SmallBert(nn.Module):
    """Words, places and kinds to vectors, an encoder, and for each word whether the answer begins or ends there."""

    def __init__(self, words: int, length: int, dim: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.words, self.places, self.kinds = (nn.Embedding(count, dim) for count in (words, length, 2))
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(dim), enable_nested_tensor=False)
        self.span = nn.Linear(dim, 2)
        for table in (self.words, self.places, self.kinds):
            nn.init.normal_(table.weight, 0.0, 0.1)

    def forward(self, words: Tensor, kinds: Tensor) -> Tensor:
        """Logits (samples, length, 2); only words of the text can be chosen."""
        places = torch.arange(words.shape[1], device=words.device)
        states = self.words(words) + self.places(places) + self.kinds(kinds)
        logits: Tensor = self.span(self.encoder(states, src_key_padding_mask=words == PADDING))
        return logits.masked_fill((kinds == 0)[:, :, None], -1e4)


def read_squad(path: str) -> list[Question]:
    """The questions of a file in SQuAD's layout, with the first answer of each."""
    questions = []
    for article in json.loads(Path(path).read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            found = list(WORD.finditer(paragraph["context"].lower()))
            text = [word.group() for word in found]
            for entry in paragraph["qas"]:
                if not entry.get("answers"):
                    continue
                start = entry["answers"][0]["answer_start"]
                stop = start + len(entry["answers"][0]["text"])
                inside = [place for place, word in enumerate(found) if word.end() > start and word.start() < stop]
                if inside:
                    questions.append(Question(WORD.findall(entry["question"].lower()), text, inside[0], inside[-1]))
    return questions


def made_up_questions(count: int) -> list[Question]:
    """Who went where, two at a time, and a question after one of them."""
    dice = random.Random(1)
    names = ["anna", "boris", "chen", "dalia", "emeka", "fumiko"]
    places = ["kitchen", "garden", "old station", "library", "market", "north tower"]
    questions = []
    for _ in range(count):
        text: list[str] = []
        spans = {}
        for name in dice.sample(names, 2):
            place = dice.choice(places).split()
            text += [name, "went", "to", "the", *place, "."]
            spans[name] = (len(text) - 1 - len(place), len(text) - 2)
        name = dice.choice(list(spans))
        questions.append(Question(["where", "is", name, "?"], text, *spans[name]))
    return questions


def encode(questions: list[Question], number: dict[str, int], length: int) -> carpool.datasets.TensorData:
    """Question, separator, and as much of the text around the answer as fits; where the answer begins and ends."""
    rows = []
    for asked, text, begin, end in questions:
        head = [BEGIN, *[number.get(word, UNKNOWN) for word in asked[: length // 3]], SEPARATOR]
        room = length - len(head)
        # Where in the window the answer stands must tell nothing, but must be the same in every process.
        first = max(0, min(begin - begin * 7 % max(1, room - (end - begin)), len(text) - room))
        shown = [number.get(word, UNKNOWN) for word in text[first : first + room]]
        words = head + shown + [PADDING] * (room - len(shown))
        kinds = [0] * len(head) + [1] * len(shown) + [0] * (room - len(shown))
        last = length - 1
        span = [min(last, len(head) + begin - first), min(last, len(head) + end - first)]
        rows.append((words, kinds, *span))
    return carpool.datasets.TensorData(*[torch.tensor(column) for column in zip(*rows, strict=True)])


def loss(model: nn.Module, batch: Any) -> Tensor:
    """The mean of the errors about begin and end."""
    words, kinds, begin, end = batch
    logits = model(words, kinds)
    return (cross_entropy(logits[..., 0], begin) + cross_entropy(logits[..., 1], end)) / 2


def bert(
    path: str = "",
    dim: int = 64,
    layers: int = 2,
    heads: int = 4,
    length: int = 0,
    vocabulary: int = 8000,
    dropout: float = 0.0,
    batch_size: int = 32,
    epochs: int = 12,
    lr: float = 2e-3,
    samples: int = 1200,
) -> carpool.Training:
    """The last tenth of the questions is kept to judge by; a text longer than ``length`` words is cut."""
    length = length or (192 if path else 24)
    questions = read_squad(path)[:samples] if path else made_up_questions(samples)
    cut = len(questions) * 9 // 10
    counts = Counter(word for question in questions[:cut] for word in (*question.asked, *question.text))
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - 4]
    number = {word: place for place, word in enumerate(frequent, start=4)}
    train, test = encode(questions[:cut], number, length), encode(questions[cut:], number, length)
    model = SmallBert(4 + len(number), length, dim, layers, heads, dropout)

    def evaluate(model: nn.Module) -> dict[str, float]:
        """How often begin and end are both right."""
        device = next(model.parameters()).device
        right = 0
        for words, kinds, begin, end in test.batches(64):
            told = model(words.to(device), kinds.to(device)).argmax(1).cpu()
            right += int(((told[:, 0] == begin) & (told[:, 1] == end)).sum())
        return {"exact_match": right / len(test)}

    return carpool.Training(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01),
        dataset=train,
        loss=loss,
        batch_size=batch_size,
        clip_norm=1.0,
        stop=carpool.Stop(epochs=epochs, target_metric="exact_match >= 0.95"),
        evaluate=evaluate,
        best="max exact_match",
    )
