"""``python -m hpcdask.clusters.detached.control FOLDER``: the process of a detached cluster.

It runs an ordinary cluster of jobs, scheduler and all, and serves the requests of those who attach.
It ends when it is told to, when nobody uses it, before its walltime, by SIGTERM, and when a client
shuts its scheduler down. With the exit code of a process that died as a second argument, by which
the script calls it again, it ends what that process left.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from typing import Any

import dask.config

from hpcdask.clusters import classes, retire
from hpcdask.clusters.controller import SHUT_DOWN
from hpcdask.clusters.display import FROM_LOGIN_NODE
from hpcdask.errors import ClusterError, HpcdaskError, UsageError
from hpcdask.jobs import detached
from hpcdask.jobs.detached import ControlRecord
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.logs import complain, say, set_log_level
from hpcdask.process import signal_name
from hpcdask.queues.registry import queue_class
from hpcdask.upstream import distributed as upstream

from .process import ControlRequest
from .protocol import OPERATION, Status, from_error

#: Seconds before the walltime at which the cluster ends, and at which all are warned; at most a
#: tenth and a fourth of it.
END_BEFORE_S, WARN_BEFORE_S = 120.0, 900.0
#: Seconds in which clients hear that their Dask tasks have failed, before the connection ends.
TELL_S = 1.0
#: Seconds between two looks at the time, and at who uses the cluster.
LOOK_S = 1.0


class Control:
    """A detached cluster in its process."""

    def __init__(
        self, folder: ClusterFolder, record: ControlRecord, keywords: dict[str, Any]
    ) -> None:
        self.folder = folder
        self.record = record
        self.in_job = detached.scheduler_job(folder) is not None
        if self.in_job:
            queue_class(folder.queue)().check(FROM_LOGIN_NODE)
        cls = classes.class_of(folder.queue)
        self.cluster = cls(**keywords, name=record.name, asynchronous=True, silence_logs=False)
        self.cluster.take_folder(folder)
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._used = time.monotonic()
        self._began = time.time()
        self._warned = False

    async def run(self) -> None:
        """Run the cluster until the end of all its jobs. Raises HpcdaskError if some are left."""
        more = ": its job was cancelled, or reached its walltime" if self.in_job else ""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
            why = f"{signal_name(number)}{more}"
            asyncio.get_running_loop().add_signal_handler(number, self.end, why)
        await self.cluster
        assert self.cluster.scheduler is not None
        self.scheduler = self.cluster.scheduler
        self.scheduler.handlers[OPERATION] = self.answer
        await self._look()  # its end may have been noted while it started
        gpus = any(group.on_gpu for group in self.cluster.groups.values())
        self._publish(state=detached.RUNNING, address=self.scheduler.address, gpus=gpus)
        say(f"the scheduler of {self.folder.name} is at {self.scheduler.address}")
        while not self.ended.done():
            await asyncio.wait([self.ended], timeout=LOOK_S)
            await self._look()
        why = self.ended.result()
        say(f"the cluster ends: {why}")
        with contextlib.suppress(OSError):  # a full disk does not keep it from its end
            self._publish(state=detached.ENDING, why=why)
        ended = ClusterError(f"the cluster {self.record.name} has ended: {why}")
        if retire.fail_waiting(self.scheduler, ended, states=(*retire.WAITING, "processing")):
            await asyncio.sleep(TELL_S)
        await self.cluster.close()
        detached.mark_ended(self.folder, why)

    def _publish(self, **facts: Any) -> None:
        self.record = dataclasses.replace(self.record, **facts)
        self.record.write(self.folder)

    def end(self, why: str) -> None:
        """Begin to end; the first reason counts."""
        if not self.ended.done():
            self.ended.set_result(why)

    async def _look(self) -> None:
        """End the cluster if it is time, or somebody has noted that it is to end."""
        limit_s, walltime_s = self.record.idle_timeout_s, self.record.walltime_s
        with contextlib.suppress(UsageError):
            record = await asyncio.to_thread(ControlRecord.read, self.folder)
            if record is not None and record.state == detached.ENDING:
                self.end(record.why)
        clients = self.scheduler.client_comms  # not what stands for published datasets
        busy = any(ws.processing for ws in self.scheduler.workers.values())
        if clients or busy or self.scheduler.queued or self.scheduler.unrunnable:
            self._used = time.monotonic()
        if str(self.cluster.failure) == SHUT_DOWN:
            self.end("its scheduler was shut down, such as by Client.shutdown")
        elif limit_s is not None and time.monotonic() - self._used > limit_s:
            self.end(f"nobody used it for {limit_s:g} s (idle_timeout)")
        elif walltime_s is not None:
            left_s = self._began + walltime_s - time.time()
            if left_s < min(END_BEFORE_S, walltime_s / 10):
                self.end("the walltime of its scheduler's job is reached")
            elif left_s < min(WARN_BEFORE_S, walltime_s / 4) and not self._warned:
                self._warn(time.localtime(self._began + walltime_s))

    def _warn(self, end: time.struct_time) -> None:
        """Tell the log, attached notebooks and clients of the walltime's end."""
        self._warned = True
        text = (
            f"warning: the cluster {self.record.name} ends at {time.strftime('%H:%M:%S', end)}, "
            f"by the walltime of its scheduler's job: what is persisted in it will be lost"
        )
        say(text)
        upstream.log(self.cluster, text)
        message = {"args": (f"hpcdask: {text}",), "file": 2, "flush": True}
        self.scheduler.log_event("print", message)

    # Requests

    async def answer(self, version: int, request: str) -> dict[str, Any]:
        """Carry out a request, and return the status or the error."""
        try:
            if version != detached.VERSION:
                raise UsageError(
                    f"the cluster {self.record.name} is of another release of hpcdask: attach "
                    f"with the one that made it"
                )
            name, told, args, keywords = json.loads(request)
            self._used = time.monotonic()
            if name == "scale":
                await self.cluster.scale(*args, **keywords)
            elif name == "adapt":
                self.cluster.adapt(**keywords)
            elif name == "stop_adapting" and self.cluster.adapts:
                upstream.adaptive(self.cluster).stop()  # the workers stay
            jobs, lines = self.cluster.jobs(), upstream.logged(self.cluster)
            status = Status(
                jobs=list(jobs),
                groups=list(self.cluster.groups),
                gpus=list(self.cluster.gpus()),
                failure=from_error(self.cluster.failure),
                most_workers=self.cluster.most_workers(),
                lines=lines[told:],
                told=len(lines),
                requested=sorted(self.cluster.plan),
                dashboard=self.cluster.dashboard_link,
                tunnel=self.cluster.tunnel,
                problem=jobs.problem,
                adapts=self.cluster.adapts,
            )
            return {"status": json.dumps(status.to_json(), default=sorted)}
        except Exception as error:  # the notebook raises it
            return {"error": from_error(error)}


async def clean_up(folder: ClusterFolder, record: ControlRecord, code: int | None) -> None:
    """End what a process left that died with this code; None: the queue has started its job again.

    Raises HpcdaskError if the queue does not answer, or jobs do not end.
    """
    if record.state == detached.ENDED:
        return
    if code is None:
        why = "its scheduler's job was started again by the queue, which lost what it held"
    else:
        how = f"killed by {signal_name(code - 128)}" if code > 128 else f"exit code {code}"
        why = f"its process died: {how}"
    complain(why)
    with contextlib.suppress(OSError):  # once this job is over, a notebook ends all
        dataclasses.replace(record, state=detached.ENDING, why=record.why or why).write(folder)
    await detached.finish(folder, why, say)


async def run(folder: ClusterFolder, code: int | None = None) -> None:
    """Run the cluster, or clean up after a process of it that died with this code.

    Raises HpcdaskError if it fails, unless nothing is left of it.
    """
    record = ControlRecord.read(folder)
    assert record is not None
    if code is not None or record.state != detached.SUBMITTED:
        await clean_up(folder, record, code)
        return
    try:
        text = (folder.path / detached.REQUEST).read_text()
        request = ControlRequest.from_json(json.loads(text))
        folder.take_over()
        dask.config.update(dask.config.config, request.config)
        set_log_level()
        await Control(folder, record, request.keywords).run()
    except HpcdaskError as error:
        if (ControlRecord.read(folder) or record).state != detached.SUBMITTED:
            raise
        complain(error)
        detached.mark_ended(folder, f"it could not start: {error}")


if __name__ == "__main__":
    os.umask(0o077)
    try:
        asyncio.run(run(ClusterFolder.open(sys.argv[1]), *map(int, sys.argv[2:])))
    except HpcdaskError as error:
        complain(error)
        sys.exit(error.exit_code)
