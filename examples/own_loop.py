"""A script that keeps its own loop: by hand `python own_loop.py`, or as a job beside others.

    [[job]]
    name = "own-loop"
    command = ["python", "own_loop.py", "--epochs", "20"]

The session gives it a device, its turn, checkpoints and a row in the table of `carpool run`; without carpool it does
nothing.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn.functional import cross_entropy

import carpool

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--lr", type=float, default=0.05)
options = parser.parse_args()

torch.manual_seed(0)
data = carpool.datasets.digits()
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * 23)

with carpool.session(model=model, optimizer=optimizer, state={"schedule": schedule}) as session:
    for inputs, labels in session.batches(data.train, batch_size=64, epochs=options.epochs):
        loss = cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        session.report(loss=loss)

print(f"accuracy {carpool.datasets.accuracy(model, data.test.to(session.device)):.3f}")
