"""``python -m hpcdask.clusters.detached.control FOLDER``: the process of a detached cluster.

It runs an ordinary cluster of jobs, scheduler and all, and obeys those who attach; see `service`.
It ends when it is told to, when nobody uses it, before its walltime, by SIGTERM, and when a client
shuts its scheduler down. With ``--after CODE``, by which the script calls it again, it ends what a
process left that died with this exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

import dask.config

from hpcdask.clusters import classes
from hpcdask.clusters.messages import FROM_LOGIN_NODE, SHUT_DOWN
from hpcdask.errors import ClusterError, HpcdaskError
from hpcdask.jobs import detached
from hpcdask.jobs.detached import ENDED, ENDING, RUNNING, SUBMITTED, ControlRecord
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.logs import complain, say, set_log_level
from hpcdask.queues.registry import queue_class, systems

from .request import BEGAN, ControlRequest
from .service import Service

if TYPE_CHECKING:
    from hpcdask.clusters.cluster import JobCluster

#: Seconds before the walltime at which the cluster ends, and at which all are warned; at most a
#: tenth and a fourth of it.
END_BEFORE_S, WARN_BEFORE_S = 120.0, 900.0
#: Seconds in which clients hear that their Dask tasks have failed, before the connection ends.
TELL_S = 1.0
#: Seconds between two looks at the time, and at who uses the cluster.
LOOK_S = 1.0


def cluster_class(system: str) -> type[JobCluster]:
    """The cluster class of a queueing system."""
    found: type[JobCluster] = getattr(classes, systems()[system].cluster)
    return found


class Control:
    """A detached cluster in its process."""

    def __init__(self, folder: ClusterFolder, request: ControlRequest) -> None:
        self.folder = folder
        self.request = request
        if detached.scheduler_job(folder) is not None:
            queue_class(request.system)().check(FROM_LOGIN_NODE)
        cls = cluster_class(request.system)
        self.cluster = cls(
            **request.keywords, name=request.name, asynchronous=True, silence_logs=False
        )
        self.cluster.take_folder(folder)
        self.record = ControlRecord(request.name, idle_timeout_s=request.idle_timeout_s)
        self.ended: asyncio.Future[str]
        self._began = float(os.environ.pop(BEGAN, time.time()))
        self._warned = False

    async def run(self) -> None:
        """From the start to the end of all jobs. Raises HpcdaskError if some are left."""
        self.ended = asyncio.get_running_loop().create_future()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled, number)
        await self.cluster
        assert self.cluster.scheduler is not None
        self.service = Service(self.cluster, self.end)
        self._publish(
            state=RUNNING,
            address=self.cluster.scheduler.address,
            ends=self._ends(),
            gpus=any(group.on_gpu for group in self.cluster.groups.values()),
            tls=self.cluster.security.require_encryption,
        )
        say(f"the scheduler of {self.folder.name} is at {self.cluster.scheduler.address}")
        while not self.ended.done():
            await asyncio.wait([self.ended], timeout=LOOK_S)
            self._look()
        why = self.ended.result()
        say(f"the cluster ends: {why}")
        try:
            self._publish(state=ENDING, why=why)
        except OSError as error:  # a full disk does not keep it from its end
            complain(f"that the cluster ends cannot be noted: {error}")
        ended = ClusterError(f"the cluster {self.request.name} has ended: {why}")
        if self.service.fail_all(ended):
            await asyncio.sleep(TELL_S)
        await self.cluster._begin_to_end()
        detached.mark_ended(self.folder, why)

    def end(self, why: str) -> None:
        """Begin to end; the first reason counts."""
        if not self.ended.done():
            self.ended.set_result(why)

    def _signalled(self, number: int) -> None:
        why = signal.Signals(number).name
        if detached.scheduler_job(self.folder) is not None:
            why += ": its job was cancelled, or reached its walltime"
        self.end(why)

    def _publish(self, **changes: Any) -> None:
        self.record = dataclasses.replace(self.record, **changes)
        self.record.write(self.folder)

    def _ends(self) -> float | None:
        limit = self.request.walltime_s
        return None if limit is None else self._began + limit

    def _look(self) -> None:
        """End the cluster if it is time."""
        if (self.cluster.failure is not None) and str(self.cluster.failure) == SHUT_DOWN:
            return self.end("its scheduler was shut down, such as by Client.shutdown")
        idle_s, limit_s = self.service.idle_s(), self.request.idle_timeout_s
        if limit_s is not None and idle_s > limit_s:
            return self.end(f"nobody used it for {limit_s:g} s (idle_timeout)")
        if (ends := self._ends()) is not None:
            left, limit = ends - time.time(), self.request.walltime_s or 0.0
            if left < min(END_BEFORE_S, limit / 10):
                return self.end("the walltime of its scheduler's job is reached")
            if left < min(WARN_BEFORE_S, limit / 4) and not self._warned:
                self._warned = True
                self.service.warn(
                    f"the cluster {self.request.name} ends at "
                    f"{time.strftime('%H:%M:%S', time.localtime(ends))}, by the walltime of its "
                    f"scheduler's job: what is persisted in it will be lost"
                )
        return None


def clean_up(folder: ClusterFolder, code: int) -> int:
    """End what a process left that has died; the exit code."""
    record = ControlRecord.read(folder)
    if record is not None and record.state == ENDED:
        return 0
    if code < 0:
        why = "its scheduler's job was started again by the queue, which lost what it held"
    else:
        how = f", killed by {signal.Signals(code - 128).name}" if code > 128 else ""
        why = f"its process died with exit code {code}{how}"
    return asyncio.run(_clean_up(folder, why))


async def _clean_up(folder: ClusterFolder, why: str) -> int:
    from hpcdask.jobs.cancel import end_cluster

    complain(why)
    folder.remove_keys()
    try:
        with contextlib.suppress(OSError):  # once this job is over, a notebook ends all
            if (record := ControlRecord.read(folder)) is not None:
                dataclasses.replace(record, why=record.why or why).write(folder)
        left = await end_cluster(folder, queue_class(folder.queue)(), say)
    except HpcdaskError as error:
        complain(error)
        return 1
    if left:
        complain(f"these jobs do not end: {' '.join(left)}")
        return 1
    detached.mark_ended(folder, why)
    return 0


async def _run(folder: ClusterFolder, request: ControlRequest) -> None:
    await Control(folder, request).run()  # it is made in its event loop


def main(arguments: list[str]) -> int:
    """From the command line to the exit code."""
    os.umask(0o077)
    folder = ClusterFolder.open(arguments[0])
    if arguments[1:2] == ["--after"]:
        return clean_up(folder, int(arguments[2]))
    record = ControlRecord.read(folder)
    if record is None or record.state != SUBMITTED:
        return clean_up(folder, -1)
    try:
        request = ControlRequest.load(folder)
        folder.take_over()
        dask.config.update(dask.config.config, request.config)
        set_log_level()
        asyncio.run(_run(folder, request))
    except HpcdaskError as error:
        complain(error)
        failed = ControlRecord.read(folder) or record
        if failed.state in (SUBMITTED, RUNNING):  # nothing was started, or all has ended
            with contextlib.suppress(OSError):
                detached.mark_ended(folder, f"it could not start: {error}")
                return 0
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    # this module would be another one for those who import it by its name
    from hpcdask.clusters.detached import control

    sys.exit(control.main(sys.argv[1:]))
