"""A Flower ClientApp as a task of a device: called unchanged, in the device's process, once per local round."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from carpool.core.errors import InputError
from carpool.federated.updates import Array, Weights
from carpool.jobs.program import Program
from carpool.runtime.engine.determinism import seed_entry
from carpool.runtime.federation.local_task import RoundProgress, as_arrays
from carpool.runtime.worker.entry_loader import find_entry

Evaluate = Callable[[nn.Module], Mapping[str, Any]]
_TTL_S = 86400.0
_EXAMPLES = "num-examples"  # Flower's own strategies weight by it


def load_model(program: Program) -> tuple[nn.Module, Evaluate | None]:
    """Call the entry of a task with a ClientApp: it returns the model, or that and a function that evaluates it."""
    folder = Path(program.folder) if program.folder else None
    seed_entry(program.seed)
    made = find_entry(program.entry, folder)(**program.args)
    model, evaluate = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"returned a {type(model).__name__}; with client_app it must return a torch module, "
            "or a module and a function that evaluates it",
            where=program.entry,
        )
    return model, evaluate


class ClientAppTask:
    """Sends a ClientApp ``train`` messages as Flower's FedAvg and FedProx do, and reads its replies.

    A call is a step: the app decides how much it trains. Its context is kept from round to round.
    """

    def __init__(self, spec: Mapping[str, Any], part: int, num_parts: int) -> None:
        from flwr.app import Context, RecordDict

        program = Program(**spec["program"])
        self._where = str(spec["client_app"])
        self._app = find_entry(self._where, Path(program.folder) if program.folder else None)
        model, _ = load_model(program)
        self._weights: Weights = as_arrays(model)
        self._names = list(self._weights)
        self._proximal = float(spec["proximal"])
        config: dict[str, bool | float | int | str] = {"partition-id": part, "num-partitions": num_parts}
        self._context = Context(0, part, config, RecordDict(), dict(spec["client_config"]))
        self.progress = RoundProgress()
        self._calls, self._round = 1, 0
        self.num_samples = 0
        initial = self._weights
        self.num_samples = self._call()  # the only way to learn how many examples the app has
        self.batch_size = max(self.num_samples, 1)
        self._context.state, self._weights = RecordDict(), initial

    def begin(self, weights: Weights, start: int, samples: int, batch_size: int) -> None:
        """Load a round's weights; as many calls are made as process about this many samples, at least one."""
        self._weights = weights
        self._calls = max(1, round(samples / max(self.num_samples, 1)))
        self._round = start // max(self.num_samples, 1) + 1
        self.progress = RoundProgress()

    def step(self) -> None:
        """Make one call."""
        self._call()
        self.progress.samples += self.num_samples
        self.progress.steps += 1
        self.progress.is_done = self.progress.steps >= self._calls

    def weights(self) -> dict[str, Array]:
        return dict(self._weights)

    def _call(self) -> int:
        """Let the app train from the current weights, and load its reply. Returns its number of examples."""
        from flwr.app import Array as FlowerArray
        from flwr.app import ArrayRecord, ConfigRecord, Metadata, RecordDict
        from flwr.app.message.message import make_message  # Message() needs a process that Flower has started

        arrays = OrderedDict((name, FlowerArray(np.asarray(self._weights[name]))) for name in self._names)
        config: dict[str, Any] = {"server-round": self._round}
        if self._proximal:
            config["proximal-mu"] = self._proximal
        content = RecordDict({"arrays": ArrayRecord(arrays), "config": ConfigRecord(config)})
        node = self._context.node_id
        metadata = Metadata(0, "", 0, node, "", str(self._round), time.time(), _TTL_S, "train")
        reply = self._app(make_message(metadata, content), self._context)
        if reply.has_error():
            raise RuntimeError(reply.error.reason)
        records = list(reply.content.array_records.values())
        metrics = {name: value for each in reply.content.metric_records.values() for name, value in each.items()}
        if len(records) != 1 or _EXAMPLES not in metrics:
            raise InputError(
                f"the reply of the ClientApp has {len(records)} array records and metrics {sorted(metrics)}",
                where=self._where,
                way_out=f"Reply with one ArrayRecord and a MetricRecord that has {_EXAMPLES!r}, as FedAvg needs.",
            )
        found = [each.numpy() for each in records[0].values()]
        names = list(records[0]) if set(records[0]) == set(self._names) else self._names
        self._weights = dict(zip(names, found, strict=True))
        self.progress.loss_sum += float(metrics.get("train_loss", metrics.get("train-loss", 0.0)))
        return int(metrics[_EXAMPLES])
