"""A controller of jobs with stand-ins for the scheduler, and for the queue as the test likes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hpcdask.clusters.controller import Controller, Group
from hpcdask.clusters.job import Policy
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.queues.base import Queue
from hpcdask.queues.local import LocalQueue


def stand_in(*workers: str) -> Any:
    """Return a scheduler with workers of these names."""
    states = {name: SimpleNamespace(name=name, nbytes=0, nanny="") for name in workers}
    return SimpleNamespace(
        workers=states,
        address="tls://here:1",
        add_plugin=lambda plugin: None,
        stream_handlers={"request-refresh-who-has": lambda **request: None},
        tasks={},
    )


def control(
    queue: Queue | None = None,
    scheduler: Any = None,
    *,
    base: Path | None = None,
    groups: dict[str, dict[str, float]] | None = None,
    size: int = 1,
    said: list[str] | None = None,
    poll_interval_s: float = 60,
    **policy: Any,
) -> Controller:
    """Return the controller of a cluster ``ab``; it has a folder where `base` is given."""
    folder: Any = SimpleNamespace(name="ab", write_report=lambda report: None)
    if base is not None:
        folder = ClusterFolder.create("ab", "local", base=base)
        folder.write_script("#!/bin/sh\n")
    controller = Controller(
        scheduler or stand_in(),
        queue or LocalQueue(),
        folder,
        poll_interval_s=poll_interval_s,
        say=print if said is None else said.append,
    )
    for name, resources in (groups or {"": {}}).items():
        controller.groups[name] = Group(controller, name, size, Policy(**policy), resources)
    return controller


def one_group(*args: Any, **keywords: Any) -> Group:
    """Return the only group of such a controller."""
    return control(*args, **keywords).groups[""]
