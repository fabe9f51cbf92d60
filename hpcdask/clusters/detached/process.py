"""The process of a detached cluster as seen from outside: its request, start, wait and end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import math
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask.config

from hpcdask.clusters.options import ClusterOptions, JobOptions, read_job_options, read_section
from hpcdask.errors import ClusterError, NotHere, QueueError, UsageError
from hpcdask.jobs import detached
from hpcdask.jobs.detached import ControlRecord
from hpcdask.jobs.folder import ClusterFolder, new_name
from hpcdask.jobs.state import lasting
from hpcdask.logs import say
from hpcdask.process import umask
from hpcdask.queues.base import Queue
from hpcdask.queues.registry import queue_class
from hpcdask.spec.parsing import parse_seconds
from hpcdask.spec.records import Record

from .protocol import plain

if TYPE_CHECKING:
    from hpcdask.clusters.cluster import JobCluster

#: Seconds without clients, attached notebooks and Dask tasks after which a cluster ends.
IDLE_TIMEOUT_S = 3600.0
#: Defaults of the scheduler's job.
USUAL = {"cores": 1, "memory": "4GiB", "job_name": "dask-scheduler"}
#: Keywords of the workers' jobs that count for the scheduler's job, too.
SHARED = ("account", "project", "queue", "walltime", "python", "job_script_prologue")
#: Seconds that a detached cluster has to see that it is to end, and to end with its jobs.
SEE_END_S, END_TIMEOUT_S = 20.0, 240.0
#: Seconds between two reads of its record at its start and at its end; and between two questions
#: to the queue about a scheduler's job that waits.
RECORD_PAUSE_S, END_PAUSE_S, QUEUE_PAUSE_S = 0.2, 1.0, 5.0


@dataclass(frozen=True)
class ControlRequest(Record):
    """Keywords of the cluster that a detached cluster's process makes, and Dask's configuration.

    It is of the release of the `ControlRecord` beside it.
    """

    keywords: dict[str, Any]
    config: dict[str, Any]


#: What starts the cluster's process, or submits its job.
Start = Callable[[], Awaitable[None]]


def prepare(cls: type[JobCluster], keywords: dict[str, Any]) -> tuple[ClusterFolder, Start]:
    """Check the keywords of a detached cluster of this class, and make its folder.

    Raises UsageError if one is unknown or not understood, or the name is taken.
    """
    queue = queue_class(cls.queue_name)()
    scheduler_job = keywords.pop("scheduler_job", None if queue.is_local else {})
    idle_s = parse_seconds(keywords.pop("idle_timeout", IDLE_TIMEOUT_S), "idle_timeout")
    if not (name := keywords.pop("name", None)):
        raise UsageError('detached=True: a name is missing, by which you attach: name="…"')
    if scheduler_job is not None and queue.is_local:
        raise UsageError("scheduler_job: this machine's jobs hang on it. Leave it out")
    on_node = scheduler_job is not None
    section = read_section(queue.jobqueue, keywords.get("config_name"))
    if on_node and keywords.get("scheduler_options") is None:  # interfaces are a login node's
        configured = section.get("scheduler-options") or {}
        keywords["scheduler_options"] = {
            name: value for name, value in configured.items() if name != "interface"
        }
    options = ClusterOptions.read(cls, {**keywords, "name": name}, on_node=on_node)
    options.queue.check()
    scheduler = _scheduler_job(queue, scheduler_job, keywords, section) if on_node else None
    walltime_s = scheduler.policy.walltime_s if scheduler else None
    request = ControlRequest(
        {word: plain(value, f"{word}={value!r}") for word, value in keywords.items()},
        plain(dask.config.config, "Dask's configuration, which it needs,"),
    )
    detached.refuse_taken(name, options.base)
    folder = ClusterFolder.create(new_name(name), cls.queue_name, options.base)
    script = folder.write("control.sh", _script(folder, options, scheduler), mode=0o700)
    folder.write(detached.REQUEST, json.dumps(request.to_json()))
    ControlRecord(name, idle_timeout_s=idle_s, walltime_s=walltime_s).write(folder)
    return folder, functools.partial(_start, folder, script, options.queue if on_node else None)


def _scheduler_job(
    queue: Queue,
    asked: Mapping[str, Any],
    keywords: Mapping[str, Any],
    section: Mapping[str, Any],
) -> JobOptions:
    """Read the scheduler's job, in the words of the workers' jobs, from which it has the rest."""
    shared = {name: keywords[name] for name in SHARED if name in keywords}
    given = {**USUAL, **shared, **asked, "device": "cpu", "gpus_per_job": 0}
    directives = given.get("job_extra_directives")
    if directives is None:
        directives = section.get("job-extra-directives") or []
    if isinstance(directives, list | tuple):  # GPUs and memory are those of workers
        given["job_extra_directives"] = [
            one
            for one in directives
            if queue.requested_gpus(str(one)) is None and not queue.told_memory.search(str(one))
        ]
    try:
        return read_job_options(queue, given, keywords.get("config_name"))
    except UsageError as error:
        raise UsageError(f"scheduler_job: {error}") from None


def _script(folder: ClusterFolder, options: ClusterOptions, scheduler: JobOptions | None) -> str:
    """Return the script that starts the cluster's process, and ends its jobs if that dies."""
    log, path = (shlex.quote(str(one)) for one in (detached.control_log(folder), folder.path))
    job = scheduler or next(iter(options.groups.values()))
    command = f"{job.python} -P -m hpcdask.clusters.detached.control {path}"
    preamble = [
        f"umask 077; exec >>{log} 2>&1; umask {umask():04o}",
        "trap : TERM INT HUP USR2  # the process below gets it, too, and ends all in order",
        "trap '' USR1  # by Grid Engine before it stops a job",
    ]
    lines = (
        f"{command} & child=$!\nwait $child; code=$?\n"
        "while kill -0 $child 2>/dev/null; do kill -TERM $child; wait $child; code=$?; done\n"
        f"[ $code = 0 ] || exec {command} $code"
    )
    if scheduler is None:
        return "\n".join(["#!/usr/bin/env bash", *preamble, lines, ""])
    tag, here = detached.scheduler_tag(folder), str(folder.path)
    request = dataclasses.replace(job.asked, tag=tag, folder=here, alone=True, warned=True)
    return options.queue.script(job.job, request, preamble, lines)


async def _start(folder: ClusterFolder, script: Path, queue: Queue | None) -> None:
    """Submit the scheduler's job to a queue, or start its process here."""
    try:
        if queue is None:  # outside of this process's tree, session and terminal
            words = ["setsid", "--fork", "bash", str(script)]
            quiet: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            await asyncio.to_thread(lambda: subprocess.run(words, check=True, timeout=60, **quiet))
        else:
            (job_id,) = await queue.submit(str(script), 1)
            folder.write(detached.JOB_ID, job_id)
    except BaseException as error:
        detached.mark_ended(folder, f"its scheduler could not be started: {error}")
        raise


async def await_running(folder: ClusterFolder, timeout_s: float) -> ControlRecord:
    """Wait until the cluster's process can be reached, which may be long in a queue.

    Raises ClusterError if it ends, or is not there in time.
    """
    deadline, asked, told = time.monotonic() + timeout_s, 0.0, ""
    while True:
        record = await asyncio.to_thread(ControlRecord.read, folder)
        if record is not None and record.state == detached.RUNNING:
            return record  # whether it lives, the connection shows
        if time.monotonic() - asked > QUEUE_PAUSE_S:
            asked, waits = time.monotonic(), told
            try:
                seen = await detached.settle(folder)
                if seen.why:
                    raise ended(folder, seen.why)
                if seen.job is not None:
                    text = f"the scheduler's job {seen.job.id} is {seen.job.words}"
                    lasts = lasting([seen.job], queue_class(folder.queue)).values()
                    waits = ". ".join([text, *lasts])
            except QueueError as error:  # it may answer later
                waits = str(error)
            if waits != told:
                told = waits
                say(told)
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{told or f'{folder.name} has not started'}, after {timeout_s:g} s. It goes on to "
                f'wait: hpcdask.attach("{folder.name}") later, or hpcdask down {folder.name}'
                f"{detached.see_log(folder)}"
            )
        await asyncio.sleep(RECORD_PAUSE_S)


async def end(folder: ClusterFolder, why: str) -> None:
    """End a detached cluster, whether or not its process answers, and see that it is over.

    Raises HpcdaskError if it is not.
    """
    record = await asyncio.to_thread(ControlRecord.read, folder)
    if folder.ended is not None or record is None:
        return
    # a cluster that only starts is held by the process that makes it
    starts, owner = record.state == detached.SUBMITTED, folder.owner
    # one that runs reads the record, and ends all in order
    stop_s = 0.0 if starts else SEE_END_S
    began, problem = time.monotonic(), ""
    if record.state != detached.ENDING:
        with contextlib.suppress(OSError):  # a full disk
            dataclasses.replace(record, state=detached.ENDING, why=why).write(folder)
    while (passed_s := time.monotonic() - began) < END_TIMEOUT_S:
        try:
            if passed_s >= stop_s:
                stop_s = math.inf
                await detached.cancel_scheduler(folder)
                if not starts and owner.lives():
                    os.kill(owner.pid, signal.SIGTERM)
            now = ClusterFolder.open(folder.path)
            seen = await detached.settle(now)  # its process may have died
            if now.ended is not None and (not seen.there or (starts and seen.job is None)):
                return
            problem = ""
        except NotHere:
            raise
        except QueueError as error:  # it may answer later
            problem = f" ({error})"
        await asyncio.sleep(END_PAUSE_S)
    raise ClusterError(
        f"{folder.name}, process {owner.pid} on {owner.host}, has not ended within "
        f"{END_TIMEOUT_S:g} s{problem}{detached.see_log(folder)}"
    )


def ended(folder: ClusterFolder, why: str) -> ClusterError:
    """Return the error on a cluster that is over."""
    text = f"the cluster {folder.name} has ended: {why}"
    return ClusterError(f"{text}{detached.see_log(folder)}")
