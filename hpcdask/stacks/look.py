"""Search for a run or cluster, and questions to all of its parts: none waits for another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, Self

from hpcdask.client import scheduler_file
from hpcdask.errors import SchedulerFileError, UsageError, root_cause
from hpcdask.jobs.detached import holder, named
from hpcdask.jobs.folder import BATCH, ClusterFolder, list_clusters
from hpcdask.jobs.owner import Owner
from hpcdask.jobs.state import counts
from hpcdask.logs import natural
from hpcdask.node.device_worker import LOOK
from hpcdask.node.observe import STOPPED, Frame, ProcessView, observe
from hpcdask.security import private
from hpcdask.security.credentials import load_credentials, to_security

from .snapshot import snapshot

if TYPE_CHECKING:
    from distributed import Security

#: Name that cloudpickle puts in place of the file's, seen in 3.1.3.
NAMELESS = "<dynamic-code>"
#: Seconds that the scheduler and a node have to answer, and how many nodes are asked at a time.
SCHEDULER_S, NODE_S, AT_ONCE = 8.0, 30.0, 64


@dataclass(frozen=True)
class Target:
    """Run or cluster: its scheduler, and its workers' nannies by the workers' names.

    `parts` are the processes of the program and scheduler, on `host`; `here`: that is this node.
    `jobs` tells the states of a cluster's jobs, `problem` why workers do not come. `script` is the
    path of a run's program.
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
    problem: str = ""

    @classmethod
    def of_file(cls, path: str, name: str = "") -> Self:
        """Return the run of a scheduler file. Raises SchedulerFileError."""
        content = scheduler_file.read(path)
        own = content.get("hpcdask") or {}
        host = str(own.get("host", ""))
        return cls(
            name=name or path,
            address=content["address"],
            doors=own.get("doors") or {},
            security=to_security(load_credentials(own["keys"]) if own.get("keys") else {}),
            parts=own.get("parts") or {},
            host=host,
            here=host == socket.gethostname(),
            script=str(own.get("script", "")),
        )

    @classmethod
    def of_cluster(cls, folder: ClusterFolder) -> Self:
        """Return the cluster of a folder. Raises SchedulerFileError without its keys."""
        known, owner, this = folder.report(), folder.owner, Owner.this()
        keys = load_credentials(str(folder.keys)) if folder.keys.exists() else {}
        return cls(
            name=folder.name,
            address=known.address,
            doors=known.doors,
            security=to_security(keys),
            parts={holder(folder): owner.pid},
            host=owner.host,
            here=(owner.host, owner.space) == (this.host, this.space),
            jobs=counts(known.jobs),
            problem=known.problem,
        )


@dataclass(frozen=True)
class WorkerLook:
    """Worker as its node sees it; `work` is the worker's own answer, or `problem` its error."""

    name: str
    host: str
    process: ProcessView
    work: Mapping[str, Any] | None
    problem: str = ""
    gpu: Mapping[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """State in a word: ``gone``, ``stopped``, ``silent``, or Dask's, such as ``running``."""
        if not self.process.state or self.process.state in STOPPED:
            return "stopped" if self.process.state else "gone"
        return "silent" if self.work is None else str(self.work.get("status", ""))


@dataclass(frozen=True)
class Report:
    """Answers of all parts; `unreached` has the errors of parts that did not answer.

    `work` is the scheduler's answer, or None. `jobs` and `problem` are those of `Target`.
    """

    name: str
    host: str
    work: Mapping[str, Any] | None
    workers: list[WorkerLook]
    parts: dict[str, ProcessView]
    unreached: dict[str, str]
    jobs: str = ""
    problem: str = ""

    @property
    def known_workers(self) -> Mapping[str, Any]:
        """Scheduler's view of each worker; empty where it does not answer."""
        known: Mapping[str, Any] = (self.work or {}).get("workers", {})
        return known


def find(name: str | None, base: str | None = None) -> Target:
    """Return the run or cluster of a name: a scheduler file, a cluster, or a run's process id.

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
    """Return the runs whose rank 0 is here, by its process id: file, and program with its start."""
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


async def look(target: Target) -> Report:
    """Return the answers of scheduler and nodes, and the processes on this one, in time."""
    from distributed.protocol.pickle import dumps

    room, script = asyncio.Semaphore(AT_ONCE), Script(target.script)
    call = {"function": dumps(snapshot), "args": dumps(()), "kwargs": dumps({}), "wait": True}
    (work, problem), *answers = await asyncio.gather(
        ask(target, target.address, SCHEDULER_S, room, "run_function", **call),
        *(ask(target, door, NODE_S, room, LOOK) for door in target.doors.values()),
    )
    if work and work["status"] != "OK":
        problem = f"it could not tell: {work.get('text', work['status'])}"
    unreached: dict[str, str] = {}
    workers: list[WorkerLook] = []
    parts: dict[str, ProcessView] = {}
    found = zip(target.doors, answers, strict=True)
    for name, (answer, error) in sorted(found, key=lambda one: natural(one[0])):
        if error:
            unreached[f"worker {name}"] = error
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
    if problem:
        unreached["scheduler"] = problem
    return Report(
        name=target.name,
        host=target.host,
        work=None if problem else work["result"],
        workers=workers,
        parts=parts,
        unreached=unreached,
        jobs=target.jobs,
        problem=target.problem,
    )


async def ask(
    target: Target,
    address: str,
    deadline_s: float,
    room: asyncio.Semaphore,
    operation: str,
    **arguments: Any,
) -> tuple[Any, str]:
    """Return the answer of a process of the target, and the error if there is none."""
    from distributed.core import rpc

    if not address:
        return None, "its address is not known yet"
    args = target.security.get_connection_args("client")
    try:
        async with room, asyncio.timeout(deadline_s), rpc(address, connection_args=args) as peer:
            return await getattr(peer, operation)(**arguments), ""
    except TimeoutError:
        return None, f"no answer within {deadline_s:g} s from {address}"
    except Exception as error:
        return None, f"no answer from {address}: {root_cause(error)}"


class Script:
    """Functions of a script with their lines; none of a script that cannot be read here."""

    def __init__(self, path: str) -> None:
        self.name = os.path.basename(path)
        self._lines: list[str] = []
        self._functions: set[tuple[str, int | None]] = set()
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            text = Path(path).read_text()
            self._functions = set(_functions(compile(text, path, "exec", dont_inherit=True)))
            self._lines = text.split("\n")

    def named(self, process: ProcessView) -> ProcessView:
        """Return a process with this script's name and lines in its frames."""
        threads = [
            replace(one, frames=list(map(self._name, one.frames))) for one in process.threads
        ]
        return replace(process, threads=threads)

    def _name(self, frame: Frame) -> Frame:
        if frame.file != NAMELESS or (frame.function, frame.line) not in self._functions:
            return frame
        return replace(frame, file=self.name, text=self._lines[frame.line - 1].strip()[:120])


def _functions(code: CodeType) -> Iterator[tuple[str, int | None]]:
    yield from ((code.co_name, line) for _, _, line in code.co_lines())
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _functions(inner)
