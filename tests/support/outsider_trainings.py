"""Trainings as people write them who have never seen carpool's own examples: one entry for each usual kind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody writes it
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, random_split

from carpool import Stop, Training


class Block(nn.Module):
    """A transformer block with a causal mask in a buffer."""

    def __init__(self, width: int, length: int, sdpa: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.drop, self.sdpa = nn.LayerNorm(width), nn.Dropout(0.1), sdpa
        self.mask: Tensor
        self.register_buffer("mask", torch.full((length, length), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        if self.sdpa:
            y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        else:
            y = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + self.mask).softmax(-1) @ v
        out: Tensor = x + self.drop(self.out(y))
        return out


class GPT(nn.Module):
    """A tiny language model whose head shares its weights with the embedding."""

    def __init__(self, vocabulary: int = 17, width: int = 8, length: int = 6, sdpa: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(Block(width, length, sdpa), Block(width, length, sdpa))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.blocks(self.embedding(tokens)))


def next_token(model: nn.Module, batch: Any) -> Any:
    (tokens,) = batch
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def gpt(sdpa: bool = False, compiled: bool = False) -> Training:
    """A causal mask of −inf or SDPA, dropout, tied weights, warm-up schedule, clipping, a random split."""
    torch.manual_seed(1337)
    train, _ = random_split(TensorDataset(torch.randint(0, 17, (60, 7))), [50, 10])
    model: Any = GPT(sdpa=sdpa)
    if compiled:
        model = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
    return Training(model, optimizer, train, next_token, 16, Stop(epochs=3), schedule=warmup, clip_norm=1.0)


def convnet(bf16: bool = False) -> Training:
    """BatchNorm and EMA, a schedule per epoch, metrics of each step, an evaluation each epoch, the best kept."""
    images, labels = torch.randn(48, 3, 6, 6), torch.randint(0, 4, (48,))
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(128, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]

    def loss(net: nn.Module, batch: Any) -> Any:
        x, y = batch
        logits = net(x)
        return F.cross_entropy(logits, y), {"accuracy": (logits.argmax(1) == y).float().mean()}

    return Training(
        model,
        optimizer,
        Subset(TensorDataset(images, labels), range(40)),
        loss,
        batch_size=8,
        stop=Stop(epochs=6, patience=2),
        schedule=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        schedule_every="epoch",
        state={"ema": ema},
        after_update=lambda net, step: ema.update_parameters(net),
        evaluate=lambda net: {"val_loss": float(F.cross_entropy(net(images[40:]), labels[40:]))},
        best="min val_loss",
        autocast="bf16" if bf16 else None,
    )


@dataclass
class Output:
    """What a Hugging Face model returns."""

    loss: Tensor
    logits: Tensor


class Classifier(nn.Module):
    """A model called as ``model(**batch).loss``."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Embedding(30, 8, padding_idx=0), nn.Linear(8, 2)
        self.register_buffer("position_ids", torch.arange(5)[None], persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Output:
        mask = attention_mask[..., None].float()
        logits = self.head((self.body(input_ids) * mask).sum(1) / mask.sum(1))
        return Output(F.cross_entropy(logits, labels), logits)


def hugging_face(micro_batch: int = 0) -> Training:
    """Dict batches from a list of dicts; optionally with gradient accumulation."""
    rows = [
        {"input_ids": torch.randint(1, 30, (5,)), "attention_mask": torch.ones(5, dtype=torch.long), "labels": i % 2}
        for i in range(33)
    ]
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return Training(
        model, optimizer, rows, lambda m, b: m(**b).loss, batch_size=12, stop=Stop(steps=9), micro_batch=micro_batch
    )


class Annealed(nn.Module):
    """A variational autoencoder; the number of its passes, which weighs a part of the loss, is its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.seen = nn.Linear(8, 4), nn.Linear(2, 8), 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]

    def forward(self, x: Tensor) -> Any:
        self.seen += 1
        mean, log_variance = self.encoder(x).chunk(2, 1)
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).mean()
        sample = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return F.mse_loss(self.decoder(sample), x) + min(1.0, self.seen / 20) * divergence


def annealed() -> Training:
    """A model with extra state that is no tensor."""
    model = Annealed()
    data = TensorDataset(torch.randn(40, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return Training(model, optimizer, data, lambda model, batch: model(batch[0]), batch_size=16, stop=Stop(epochs=4))


class MomentumEncoder(nn.Module):
    """Contrastive learning against an encoder that follows the trained one within the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.slow = nn.Linear(8, 6), nn.Linear(8, 6).requires_grad_(False)
        self.queue: Tensor
        self.register_buffer("queue", F.normalize(torch.randn(32, 6)))

    def forward(self, x: Tensor) -> Any:
        keys = self._keys(x)
        queries = F.normalize(self.trained(x))
        against = queries @ self.queue.clone().T
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), against], 1)
        self.queue.copy_(torch.cat([keys, self.queue])[: len(self.queue)])
        return F.cross_entropy(logits / 0.2, torch.zeros(len(x), dtype=torch.long, device=x.device))

    @torch.no_grad()
    def _keys(self, x: Tensor) -> Tensor:
        for slow, trained in zip(self.slow.parameters(), self.trained.parameters(), strict=True):
            slow.lerp_(trained, 0.1)
        return F.normalize(self.slow(x + 0.1 * torch.randn_like(x)))


def momentum_encoder() -> Training:
    """A loss that modifies weights which the optimizer does not hold."""
    model = MomentumEncoder()
    optimizer = torch.optim.SGD(model.trained.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(64, 8))
    return Training(model, optimizer, data, lambda model, batch: model(batch[0]), batch_size=16, stop=Stop(epochs=4))


def unfreezing() -> Training:
    """A body that is frozen, with its BatchNorm in eval mode, for the first steps."""
    body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()).requires_grad_(False)
    model = nn.Sequential(body.eval(), nn.Linear(16, 3))

    def unfreeze(model: nn.Module, steps: int) -> None:
        if steps == 6:
            body.requires_grad_(True).train()

    return Training(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.02),
        TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,))),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        batch_size=16,
        stop=Stop(epochs=5),
        clip_norm=0.5,
        after_update=unfreeze,
    )


def two_optimizers() -> Training:
    """Matrices by SGD, the rest by Adam, each with its schedule, on one loss."""
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizers = [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.Adam(others, lr=0.01)]
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], 9),
        torch.optim.lr_scheduler.ExponentialLR(optimizers[1], 0.9),
    ]
    data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
    return Training(
        model,
        optimizers,
        data,
        lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        batch_size=16,
        stop=Stop(steps=9),
        schedule=schedules,
        clip_norm=0.5,
    )


def gan_step(model: Any, batch: Any, optimizers: Any) -> Any:
    (real,) = batch
    generator, discriminator = model["g"], model["d"]
    noise = torch.randn(len(real), 3, device=real.device)
    ones, zeros = torch.ones_like(real[:, :1]), torch.zeros_like(real[:, :1])
    optimizers["d"].zero_grad()
    fake = generator(noise)
    d_loss = F.binary_cross_entropy_with_logits(discriminator(real), ones) + F.binary_cross_entropy_with_logits(
        discriminator(fake.detach()), zeros
    )
    d_loss.backward()  # type: ignore[no-untyped-call]
    optimizers["d"].step()
    optimizers["g"].zero_grad()
    g_loss = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
    g_loss.backward()  # type: ignore[no-untyped-call]
    optimizers["g"].step()
    return g_loss, {"d_loss": d_loss}


def gan() -> Training:
    """Two networks, two optimizers, one step function."""
    model = nn.ModuleDict(
        {
            "g": nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)),
            "d": nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(16, 1)),
        }
    )
    optimizers = {
        "g": torch.optim.Adam(model["g"].parameters(), lr=2e-3, betas=(0.5, 0.999)),
        "d": torch.optim.Adam(model["d"].parameters(), lr=2e-3, betas=(0.5, 0.999)),
    }
    data = TensorDataset(torch.randn(50, 2) * 0.3 + 1)
    return Training(model, optimizers, data, step=gan_step, batch_size=16, stop=Stop(steps=12))


class ActorCritic(nn.Module):
    """A policy and a value function over one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(4, 16), nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(observation))
        return self.policy(hidden), self.value(hidden).squeeze(-1)


def actor_critic() -> Training:
    """Reinforcement learning: the step draws its own episodes; an optimizer each for policy and value."""
    model = ActorCritic()
    actor = torch.optim.Adam([*model.body.parameters(), *model.policy.parameters()], lr=1e-2)
    critic = torch.optim.RMSprop(model.value.parameters(), lr=1e-2)

    def step(net: Any, batch: Any, optimizers: Any) -> Any:
        observations = torch.randn(len(batch), 4)
        logits, values = net(observations)
        actions = torch.distributions.Categorical(logits=logits).sample()  # type: ignore[no-untyped-call]
        rewards = (actions == (observations[:, 0] > 0).long()).float() + 0.1 * random.random()
        advantage = rewards - values.detach()
        policy_loss = -(torch.distributions.Categorical(logits=logits).log_prob(actions) * advantage).mean()  # type: ignore[no-untyped-call]
        value_loss = F.mse_loss(values, rewards)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (policy_loss + value_loss).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
        return policy_loss.item(), {"reward": rewards.mean(), "value_loss": value_loss.item()}

    return Training(model, [actor, critic], range(10_000), step=step, batch_size=8, stop=Stop(steps=12))


def accumulating() -> Training:
    """A step function that accumulates gradients over three steps, with the count in the checkpointed state."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    counter = Counter()

    def step(net: nn.Module, batch: Any, optimizer: Any) -> Any:
        loss = F.mse_loss(net(batch[0]).squeeze(-1), batch[1]) / 3
        loss.backward()  # type: ignore[no-untyped-call]
        counter.count += 1
        if counter.count % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    data = TensorDataset(torch.randn(40, 4), torch.randn(40))
    return Training(model, optimizer, data, step=step, batch_size=8, stop=Stop(steps=13), state={"counter": counter})


class Counter:
    """A number in a checkpoint."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Stream(IterableDataset[Any]):
    """A stream with a shuffle buffer and random noise, of a length that nobody knows."""

    def __init__(self, size: int = 41) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        held: list[int] = []
        for number in range(self.size):
            held.append(number)
            if len(held) == 8:
                yield self._sample(held.pop(random.randrange(8)))
        while held:
            yield self._sample(held.pop(random.randrange(len(held))))

    def _sample(self, number: int) -> Any:
        return torch.randn(4) + number / self.size + self.epoch, number % 3


def streaming() -> Training:
    """An IterableDataset; epochs end when the stream does."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return Training(
        model, optimizer, Stream(), lambda m, b: F.cross_entropy(m(b[0]), b[1]), batch_size=12, stop=Stop(epochs=3)
    )


class Augmented(Dataset[Any]):
    """A map-style dataset with random augmentation."""

    def __init__(self) -> None:
        self.images = torch.randn(30, 4)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        image = self.images[index]
        return (image.flip(0) if random.random() < 0.5 else image) + 0.1 * torch.randn(4), index % 3


def augmented() -> Training:
    """A dataset with random transforms and a collate function."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def collate(rows: list[Any]) -> dict[str, Tensor]:
        return {"x": torch.stack([x for x, _ in rows]), "y": torch.tensor([y for _, y in rows])}

    return Training(
        model,
        optimizer,
        Augmented(),
        lambda m, b: (F.cross_entropy(m(b["x"]), b["y"], reduction="sum"), len(b["y"]), {"n": torch.ones(())}),
        batch_size=12,
        stop=Stop(epochs=3),
        collate=collate,
    )
