"""Search for a run or cluster, and questions to all of its parts: none waits for another."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import linecache
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, Self

from hpcdask.client import scheduler_file
from hpcdask.errors import SchedulerFileError, UsageError, root_cause
from hpcdask.jobs import detached
from hpcdask.jobs.folder import BATCH, ClusterFolder, list_clusters
from hpcdask.jobs.state import ClusterReport, counts
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
#: Name of the scheduler, and beginning of those of workers, among the processes of a run.
SCHEDULER, WORKER = "scheduler", "worker "
#: Seconds that the scheduler and a node have to answer, and how many are asked at a time.
SCHEDULER_S, NODE_S, AT_ONCE = 8.0, 30.0, 64


@dataclass(frozen=True)
class Target:
    """Run or cluster, with the addresses of its scheduler and of its workers' nannies.

    `parts` are the processes of the program and scheduler, on `host`; `here`: that is this node. A
    cluster has a `folder`, a run may have the path of its `script`.
    """

    name: str
    addresses: dict[str, str]
    security: Security
    parts: dict[str, int]
    host: str
    here: bool
    folder: ClusterFolder | None = None
    script: str = ""

    @classmethod
    def of_file(cls, path: str, name: str = "") -> Self:
        """Return the run of a scheduler file. Raises SchedulerFileError."""
        content = scheduler_file.read(path)
        own = content["hpcdask"]
        addresses = _addresses(content["address"], own.get("doors", {}))
        security = to_security(load_credentials(own["keys"]) if own.get("keys") else {})
        parts, host, script = own.get("parts", {}), own.get("host", ""), own.get("script", "")
        here = host == socket.gethostname()
        return cls(name or path, addresses, security, parts, host, here, script=script)

    @classmethod
    def of_cluster(cls, folder: ClusterFolder) -> Self:
        """Return the cluster of a folder. Raises SchedulerFileError without its keys."""
        known, owner = folder.report(), folder.owner
        addresses = _addresses(known.address, known.doors)
        keys = load_credentials(str(folder.keys)) if folder.keys.exists() else {}
        parts, here = {detached.holder(folder): owner.pid}, owner.lives() is not None
        return cls(folder.name, addresses, to_security(keys), parts, owner.host, here, folder)


def _addresses(scheduler: str, nannies: dict[str, str]) -> dict[str, str]:
    names = sorted(nannies, key=natural)
    return {SCHEDULER: scheduler} | {f"{WORKER}{name}": nannies[name] for name in names}


@dataclass(frozen=True)
class WorkerLook:
    """Worker as its node sees it; `work` is its own answer, empty if the worker is silent."""

    name: str
    host: str
    process: ProcessView
    work: Mapping[str, Any]
    gpu: Mapping[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """State in a word: ``gone``, ``stopped``, ``silent``, or Dask's, such as ``running``."""
        if not self.process.state or self.process.state in STOPPED:
            return "stopped" if self.process.state else "gone"
        return str(self.work["status"]) if self.work else "silent"


@dataclass(frozen=True)
class Report:
    """Answers of all parts; `unreached` has the errors of parts that did not answer.

    `work` is the scheduler's answer, empty if there is none. `jobs` tells the states of a cluster's
    jobs, `problem` why workers do not come.
    """

    name: str
    work: Mapping[str, Any]
    workers: list[WorkerLook]
    parts: dict[str, ProcessView] = field(default_factory=dict)
    unreached: dict[str, str] = field(default_factory=dict)
    jobs: str = ""
    problem: str = ""

    @property
    def known_workers(self) -> Any:
        """Scheduler's view of each worker; empty where it does not answer."""
        return self.work.get("workers", {})


def find(name: str | None, base: str | None = None) -> Target:
    """Return the run or cluster of a name: a scheduler file, a cluster, or a run's process id.

    Without a name the only one that is there. Raises UsageError or SchedulerFileError.
    """
    name = name or os.environ.get(scheduler_file.VARIABLE)
    clusters = [one for one in list_clusters(base) if one.lives() is not False]
    runs = _runs_here()
    known = [*runs, *(one.name for one in clusters)]
    there = ", ".join(runs.get(one, one) for one in known)
    if name is None:
        if len(known) != 1:
            listed = f"There are: {there}" if there else "None is known here"
            raise UsageError(
                f"name one of your runs or clusters: hpcdask stacks NAME. {listed}. For a run on "
                f"other nodes, give its scheduler file, or call this on the node of its rank 0"
            )
        (name,) = known
    if name in runs:
        return Target.of_file(_run_path(name), f"the run of process {runs[name]}")
    if (cluster := detached.named(name, clusters)) is not None:
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


def _run_path(pid: str) -> str:
    return os.path.join(private.node_folder(scheduler_file.RUNS), pid)


def _runs_here() -> dict[str, str]:
    """Return the runs whose rank 0 is here, by its process id: that with program and start."""
    found = {}
    with contextlib.suppress(OSError):
        for pid in sorted(os.listdir(_run_path(""))):
            with contextlib.suppress(SchedulerFileError, KeyError):
                known = scheduler_file.read(_run_path(pid))["hpcdask"]
                since = datetime.fromtimestamp(int(known["started"]))
                found[pid] = f"{pid} ({known['program']}, since {since})"
    return found


async def look(target: Target) -> Report:
    """Return the answers of scheduler and nodes, and the processes on this one, in time."""
    answers = await _ask_all(target)
    told, error = answers.pop(SCHEDULER)
    if told and told["status"] != "OK":
        error = f"it could not tell: {told.get('text', told['status'])}"
    unreached = {SCHEDULER: error} if error else {}
    workers: list[WorkerLook] = []
    parts: dict[str, ProcessView] = {}
    for name, (answer, problem) in answers.items():
        if problem:
            unreached[name] = problem
            continue
        process = named(ProcessView.from_json(answer["worker"]), target.script)
        work, gpu = answer["work"] or {}, answer["gpu"]
        workers.append(WorkerLook(answer["name"], answer["host"], process, work, gpu))
        parts |= {part: ProcessView.from_json(seen) for part, seen in answer["parts"].items()}
    for part, pid in target.parts.items():
        if part not in parts and target.here:
            parts[part] = await asyncio.to_thread(observe, pid)
        elif part not in parts:
            unreached[part] = f"it is process {pid} on {target.host}. There: hpcdask stacks"
    cluster = target.folder.report() if target.folder else ClusterReport()
    known, jobs = {} if error else told["result"], counts(cluster.jobs)
    return Report(target.name, known, workers, parts, unreached, jobs, cluster.problem)


async def _ask_all(target: Target) -> dict[str, tuple[Any, str]]:
    """Ask scheduler and nannies at once; return each one's answer, or None and its error."""
    from distributed.core import rpc
    from distributed.protocol.pickle import dumps

    call = {"function": dumps(snapshot), "args": dumps(()), "kwargs": dumps({}), "wait": True}
    args, room = target.security.get_connection_args("client"), asyncio.Semaphore(AT_ONCE)

    async def ask(name: str, address: str) -> tuple[Any, str]:
        is_scheduler = name == SCHEDULER
        seconds = SCHEDULER_S if is_scheduler else NODE_S
        if not address:
            return None, "its address is not known yet"
        try:
            async with room, asyncio.timeout(seconds), rpc(address, connection_args=args) as peer:
                request = peer.run_function(**call) if is_scheduler else getattr(peer, LOOK)()
                return await request, ""
        except TimeoutError:
            return None, f"no answer within {seconds:g} s from {address}"
        except Exception as error:
            return None, f"no answer from {address}: {root_cause(error)}"

    answers = await asyncio.gather(*(ask(*one) for one in target.addresses.items()))
    return dict(zip(target.addresses, answers, strict=True))


def named(process: ProcessView, script: str) -> ProcessView:
    """Return a process with the script's name and lines in frames of its functions."""
    lines = _lines(script)

    def name(frame: Frame) -> Frame:
        if frame.file != NAMELESS or (frame.function, frame.line) not in lines:
            return frame
        text = linecache.getline(script, frame.line).strip()[:120]
        return replace(frame, file=os.path.basename(script), text=text)

    threads = [replace(one, frames=list(map(name, one.frames))) for one in process.threads]
    return replace(process, threads=threads)


@functools.cache
def _lines(script: str) -> set[tuple[str, int | None]]:
    """Return function and number of a script's lines; none of one that cannot be read here."""
    codes, found = [], set()
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        codes.append(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True))
    for code in codes:  # which grows
        found |= {(code.co_name, number) for *_, number in code.co_lines()}
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
    return found
