"""The implementation: one scheduler, one worker a rank, real memory behind each.

It answers the questions of ``spec.policy`` and can stand in any world.  What it enqueues is described by
the operations that it returns; ``execute`` runs the same operation on a rank's real memory when the world
says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from impl.decisions import Decisions
from impl.device import Activations, Device, Feed, Kernels, kernels_named
from impl.scheduler.output import SchedulerOutput
from impl.scheduler.scheduler import Scheduler
from impl.worker import Worker
from spec.chains import Chains
from spec.config import Config
from spec.policy import Answer, Arrival, Output, Program


class Engine:
    """A whole engine.  ``feed`` brings what comes from outside a worker: token ids, verified counts."""

    def __init__(
        self,
        config: Config,
        chains: Chains,
        feed: Feed,
        *,
        decide: Decisions | None = None,
        kernels: Kernels | None = None,
        device: torch.device | None = None,
        poison: bool = False,
        device_type: Callable[..., Device] = Device,
    ) -> None:
        decide = decide or Decisions()
        self.scheduler = Scheduler(config, chains, decide)
        wire: Activations = {}
        self.devices = [
            device_type(
                config, rank, kernels or kernels_named("torch"), feed, wire, device=device, poison=poison
            )
            for rank in range(config.ranks)
        ]
        self.workers = [Worker(config, decide, one) for one in self.devices]

    def on_arrive(self, arrival: Arrival) -> Answer:
        """A request has arrived."""
        return self.scheduler.on_arrive(arrival)

    def schedule(self) -> Answer:
        """The next step."""
        return self.scheduler.schedule()

    def worker_program(self, rank: int, message: Any) -> Program:
        """What the rank enqueues."""
        assert isinstance(message, SchedulerOutput)
        return self.workers[rank].program(message)

    def on_output(self, output: Output) -> Answer:
        """A step's tokens have come back."""
        return self.scheduler.on_output(output)

    def on_report(self, job: int, rank: int, ok: bool) -> Answer:
        """A rank is done with a transfer."""
        return self.scheduler.on_report(job, rank, ok)

    def on_abort(self, uid: tuple[str, int]) -> Answer:
        """The client has gone away."""
        return self.scheduler.on_abort(uid)

    def on_reset(self, scope: str) -> Answer:
        """Clear the prefix caches."""
        return self.scheduler.on_reset(scope)
