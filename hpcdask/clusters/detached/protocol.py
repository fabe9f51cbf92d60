"""Requests that a detached cluster serves over its scheduler's connections, and their answer.

There are three: status, scale and adapt. Each request and the answer, a `Status`, is JSON, with the
version of `hpcdask.jobs.detached`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from distributed.core import rpc

from hpcdask import errors
from hpcdask.clusters.job import Job
from hpcdask.errors import ClusterError, UsageError
from hpcdask.gpu.samples import GpuState
from hpcdask.jobs.detached import VERSION
from hpcdask.spec.records import Record

#: Name of the handler of requests.
OPERATION = "hpcdask_control"


def plain(value: Any, what: str) -> Any:
    """Return a value as JSON gives it again. Raises UsageError for what JSON cannot hold."""

    def convert(value: Any) -> Any:
        if isinstance(value, timedelta):
            return value.total_seconds()
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        raise TypeError(f"{type(value).__name__} is no plain value")

    try:
        return json.loads(json.dumps(value, default=convert))
    except (TypeError, ValueError) as error:
        text = f"{what} cannot be sent to the process of a detached cluster: {error}"
        raise UsageError(text) from None


def from_error(error: BaseException | None) -> dict[str, str] | None:
    """Return the JSON of an error, for `to_error`."""
    return None if error is None else {"class": type(error).__name__, "text": str(error)}


def to_error(known: Mapping[str, str] | None) -> Any:
    """Return the error again; one that is not of `hpcdask.errors` becomes a ClusterError."""
    if known is None:
        return None
    kind, text = getattr(errors, known["class"], None), known["text"]
    return errors.remake(kind, (text,)) if kind else ClusterError(f"{known['class']}: {text}")


@dataclass
class Status(Record):
    """State of a detached cluster, for an attached notebook; errors are as `from_error` has them.

    There may come to be `most_workers`. `lines` are the messages since the last answer, of `told`
    in all. `requested` are the names of the wanted workers. `problem` is the reason for which jobs
    may wait for ever. `adapts`: the number of workers follows the work.
    """

    jobs: list[Job] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    gpus: list[GpuState] = field(default_factory=list)
    failure: dict[str, str] | None = None
    most_workers: float = 0
    lines: list[str] = field(default_factory=list)
    told: int = 0
    requested: list[str] = field(default_factory=list)
    dashboard: str = ""
    tunnel: str = ""
    problem: str = ""
    adapts: bool = False


async def ask(scheduler: rpc, name: str, told: int, *args: Any, **keywords: Any) -> Status:
    """Send a request to a detached cluster, and return the answer.

    `told` messages of the cluster are known already. Raises the cluster's own error, and OSError if
    the cluster does not answer.
    """
    request = plain([name, told, args, keywords], f"the arguments of {name}")
    answer = await getattr(scheduler, OPERATION)(version=VERSION, request=json.dumps(request))
    if "error" in answer:
        raise to_error(answer["error"])
    return Status.from_json(json.loads(answer["status"]))
