"""Finds a run or cluster, and asks all of it at once what it does: no part waits for another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from hpcdask.client import scheduler_file
from hpcdask.errors import SchedulerFileError, UsageError, root_cause
from hpcdask.jobs.detached import holder, named
from hpcdask.jobs.folder import BATCH, ClusterFolder, list_clusters
from hpcdask.jobs.owner import Owner
from hpcdask.jobs.state import counts
from hpcdask.logs import natural
from hpcdask.node.device_worker import LOOK
from hpcdask.node.observe import ProcessView, observe
from hpcdask.security import private
from hpcdask.security.credentials import load_credentials, to_security

from .script import Script
from .snapshot import snapshot

if TYPE_CHECKING:
    from distributed import Security

#: Seconds that the scheduler and a node have to answer, and how many nodes are asked at a time.
SCHEDULER_S, NODE_S, AT_ONCE = 8.0, 30.0, 64


@dataclass(frozen=True)
class Target:
    """A run or cluster: its scheduler, and its workers' nannies by the workers' names.

    `parts` are the processes of the program and scheduler, on `host`; `here`: that is this node.
    `jobs` says how a cluster's jobs are. `script` is the path of a run's program.
    """

    name: str
    address: str
    doors: dict[str, str]
    security: Security
    parts: dict[str, int]
    host: str
    here: bool
    jobs: str = ""
    script: str = ""

    @classmethod
    def of_file(cls, path: str, name: str = "") -> Self:
        """Return what a scheduler file names. Raises SchedulerFileError."""
        content = scheduler_file.read(path)
        own = content.get("hpcdask") or {}
        keys = load_credentials(own["keys"]) if own.get("keys") else {}
        host = str(own.get("host", ""))
        return cls(
            name or path,
            content["address"],
            own.get("doors") or {},
            to_security(keys),
            own.get("parts") or {},
            host,
            host == socket.gethostname(),
            script=str(own.get("script", "")),
        )

    @classmethod
    def of_cluster(cls, folder: ClusterFolder) -> Self:
        """Return what a cluster's folder names. Raises SchedulerFileError without its keys."""
        address, doors = folder.doors()
        keys = load_credentials(str(folder.keys)) if folder.keys.is_dir() else {}
        owner, this = folder.owner, Owner.this()
        here = (owner.host, owner.space) == (this.host, this.space)
        parts = {holder(folder): owner.pid}
        jobs = counts(folder.reports().values())
        return cls(folder.name, address, doors, to_security(keys), parts, owner.host, here, jobs)


@dataclass(frozen=True)
class WorkerLook:
    """A worker as its node sees it; `work` is what it tells, or `problem` why it does not."""

    name: str
    host: str
    process: ProcessView
    work: Mapping[str, Any] | None
    problem: str = ""
    gpu: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """All that was seen; `unreached` says why the rest was not.

    `work` is what the scheduler tells, or None. `jobs` says how a cluster's jobs are.
    """

    name: str
    host: str
    work: Mapping[str, Any] | None
    workers: list[WorkerLook]
    parts: dict[str, ProcessView]
    unreached: dict[str, str]
    jobs: str = ""


# Which


def find(name: str | None, base: str | None = None) -> Target:
    """The run or cluster of a name: a scheduler file, a cluster, or a run's process id.

    Without a name the only one that is there. Raises UsageError or SchedulerFileError.
    """
    name = name or os.environ.get(scheduler_file.VARIABLE)
    clusters = [one for one in list_clusters(base) if one.lives() is not False]
    runs = _runs_here()
    names = [one.name for one in clusters]
    there = ", ".join([*(about for _, about in runs.values()), *names])
    if name is None:
        known = [*runs, *names]
        if len(known) != 1:
            listed = f"There are: {there}" if there else "None is known here"
            raise UsageError(
                f"name one of your runs or clusters: hpcdask stacks NAME. {listed}. For a run on "
                f"other nodes, give its scheduler file, or call this on the node of its rank 0"
            )
        (name,) = known
    if name in runs:
        return Target.of_file(runs[name][0], f"the run of process {runs[name][1]}")
    if (cluster := named(name, clusters)) is not None:
        return Target.of_cluster(cluster)
    if os.path.sep in name or os.path.exists(name):
        return Target.of_file(name)
    if name.startswith(BATCH):
        raise UsageError(
            f"{name} is a job of hpcdask submit: its log is the file that submit named; for what "
            f"it does now, call hpcdask stacks on its first node"
        )
    raise UsageError(
        f"no running cluster, run or scheduler file is called {name}. There are: {there or 'none'}"
    )


def _runs_here() -> dict[str, tuple[str, str]]:
    """The runs whose rank 0 is on this node, by its process id: file, and what runs since when."""
    found = {}
    with contextlib.suppress(OSError):
        folder = private.node_folder(scheduler_file.RUNS)
        for name in sorted(os.listdir(folder)):
            with contextlib.suppress(SchedulerFileError, OSError):
                path = os.path.join(folder, name)
                known = scheduler_file.read(path).get("hpcdask", {})
                at = time.localtime(known.get("started", os.stat(path).st_mtime))
                since = f"since {time.strftime('%Y-%m-%d %H:%M:%S', at)}"
                what = ", ".join(filter(None, [known.get("program"), since]))
                found[name] = path, f"{name} ({what})"
    return found


# What it does


async def look(target: Target) -> Report:
    """Ask scheduler and nodes, and look at what is on this one; ends by its deadlines."""
    room = asyncio.Semaphore(AT_ONCE)
    args = target.security.get_connection_args("client")
    work, answers = await asyncio.gather(
        _ask_scheduler(target.address, args),
        asyncio.gather(*(_ask_node(door, args, room) for door in target.doors.values())),
    )
    script = Script(target.script)
    unreached: dict[str, str] = {}
    workers: list[WorkerLook] = []
    parts: dict[str, ProcessView] = {}
    for name, answer in sorted(
        zip(target.doors, answers, strict=True), key=lambda one: natural(one[0])
    ):
        if isinstance(answer, str):
            unreached[f"worker {name}"] = answer
            continue
        process = script.named(ProcessView.from_json(answer["worker"]))
        told = {one: answer[one] for one in ("name", "host", "work", "problem", "gpu")}
        workers.append(WorkerLook(process=process, **told))
        parts |= {part: ProcessView.from_json(seen) for part, seen in answer["parts"].items()}
    for part, pid in target.parts.items():
        if part not in parts and target.here:
            parts[part] = await asyncio.to_thread(observe, pid)
        elif part not in parts:
            unreached[part] = f"it is process {pid} on {target.host}. There: hpcdask stacks"
    if isinstance(work, str):
        unreached["scheduler"] = work
    told_work = None if isinstance(work, str) else work
    return Report(target.name, target.host, told_work, workers, parts, unreached, target.jobs)


async def _ask_scheduler(address: str, args: Mapping[str, Any]) -> dict[str, Any] | str:
    from distributed.core import rpc
    from distributed.protocol.pickle import dumps

    if not address:
        return "no worker has registered yet"
    try:
        async with asyncio.timeout(SCHEDULER_S), rpc(address, connection_args=args) as scheduler:
            call = {"function": snapshot, "args": (), "kwargs": {}}
            pickled = {name: dumps(value) for name, value in call.items()}
            answer = await scheduler.run_function(**pickled, wait=True)
    except TimeoutError:
        return f"no answer within {SCHEDULER_S:g} s from {address}"
    except OSError as error:
        return root_cause(error)
    if answer["status"] != "OK":
        return f"it could not tell: {answer.get('text', answer['status'])}"
    result: dict[str, Any] = answer["result"]
    return result


async def _ask_node(
    door: str, args: Mapping[str, Any], room: asyncio.Semaphore
) -> dict[str, Any] | str:
    from distributed.core import rpc

    if not door:
        return "it has no nanny"
    try:
        async with room, asyncio.timeout(NODE_S), rpc(door, connection_args=args) as nanny:
            answer: dict[str, Any] = await getattr(nanny, LOOK)()
            return answer
    except TimeoutError:
        return f"its node has not answered at {door} for {NODE_S:g} s"
    except Exception as error:
        return f"its node does not answer at {door}: {root_cause(error)}"
