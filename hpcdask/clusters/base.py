"""Base of a cluster of jobs in this process and of one that is attached to another process."""

from __future__ import annotations

import asyncio
import contextlib
import textwrap
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable
from html import escape
from typing import Any, Self, cast

import dask.config
from distributed import Scheduler
from distributed.core import Status
from distributed.deploy.cluster import Cluster
from tornado.ioloop import IOLoop

from hpcdask.client.defaults import prompt_clients
from hpcdask.comm.warmup import transport_of
from hpcdask.errors import HpcdaskError, UsageError
from hpcdask.gpu.monitor import GpuTable, monitor_of
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.jobs.logs import ClusterLogs
from hpcdask.logs import complain
from hpcdask.upstream import distributed as upstream

from .display import JobTable

#: Requests under way: the event loop itself holds tasks weakly.
_requests: set[asyncio.Future[Any]] = set()


class BaseCluster(Cluster):
    """Cluster of jobs, with its views; `_folder` is None before the start.

    `scheduler` is that of this process, or None. `dashboard_link` is the dashboard's address, seen
    from this machine, and `tunnel` the command that brings it to the user's, if one is needed.
    """

    scheduler: Scheduler | None = None
    dashboard_link: str = ""
    tunnel: str = ""
    _folder: ClusterFolder | None = None

    def __init__(self, *, asynchronous: bool, loop: Any, name: str | None) -> None:
        dask.config.set(prompt_clients())
        self._exits = contextlib.ExitStack()
        loop = IOLoop.current() if loop is None and asynchronous else loop
        super().__init__(asynchronous=asynchronous, loop=loop, quiet=True, name=name)

    def _begin(self) -> None:
        """Start the cluster, unless the user's event loop does."""
        if self.called_from_running_loop:
            return
        upstream.loop_runner(self).start()
        try:
            self._request("start", self._start)
        except BaseException:
            self.close()
            raise

    def close(self, timeout: float | None = None) -> Any:
        """Cancel all jobs, wait until the queue no longer has them, and stop the scheduler.

        An object that is attached to a detached cluster only detaches: its `shutdown` ends the
        cluster.

        Parameters
        ----------
        timeout
            Seconds to wait for that.

        Raises
        ------
        QueueError
            Jobs are still in the queue; the message names them. Another call tries again.
        """
        try:
            return super().close(timeout)
        finally:
            if not self.asynchronous and self.status == Status.closed:
                upstream.loop_runner(self).stop()

    def __enter__(self) -> Self:
        return cast(Self, super().__enter__())

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._close()
            raise
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    def _request(self, name: str, work: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Start a method's work; wait for its end, or in an event loop return a future."""
        if not self.asynchronous:
            try:
                return self.sync(work, *args, **keywords)
            except HpcdaskError as error:
                raise error.with_traceback(None) from None  # the event loop's tells nothing

        def tell(task: asyncio.Future[Any]) -> None:  # nobody may await it
            _requests.discard(task)
            if not task.cancelled() and (error := task.exception()):
                complain(f"{name}: {error}")

        task = asyncio.ensure_future(work(*args, **keywords))
        _requests.add(task)
        task.add_done_callback(tell)
        return task

    async def _wait_for_workers(self, n_workers: int = 0, timeout: Any = None) -> None:
        """Wait for workers, or raise why they will not come; name the jobs after a timeout."""
        waiting = asyncio.ensure_future(super()._wait_for_workers(n_workers, timeout))
        try:
            while not waiting.done():
                if (failure := self.failure) is not None and self.most_workers() < n_workers:
                    raise failure
                await asyncio.wait([waiting], timeout=0.1)
            await waiting
        except TimeoutError as error:
            error.add_note(f"Jobs: {self.jobs().counts() or 'none'}")
            raise
        finally:
            waiting.cancel()

    @abstractmethod
    def most_workers(self) -> float:
        """Return how many workers there may come to be."""

    # What it shows

    @abstractmethod
    def jobs(self) -> JobTable:
        """Return the state of all jobs, including those that are over."""

    def gpus(self) -> GpuTable:
        """Return what the GPUs of all workers do now; empty while none was sampled."""
        return monitor_of(self.scheduler).table()

    @property
    @abstractmethod
    def failure(self) -> HpcdaskError | None:
        """Return why the cluster has ended or submits no more jobs; None while all is well."""

    def job_logs(
        self, *ids: str | int | Iterable[str | int], lines: int | None = None
    ) -> dict[str, str]:
        """Return the logs of jobs, by id, including those of jobs that are over.

        Parameters
        ----------
        *ids
            Ids of jobs, or lists of ids. Default: all jobs.
        lines
            How many of the last lines of each log. Default: all.
        """
        if self._folder is None:
            return {}
        known = [str(job.id) for job in self.jobs()]
        lists = [[some] if isinstance(some, str | int) else some for some in ids]
        wanted = [str(one) for some in lists for one in some] if ids else known
        if unknown := set(wanted) - set(known):
            names = ", ".join(sorted(unknown))
            raise UsageError(f"job_logs: no job {names}. There are: {', '.join(known)}")
        found = self._folder.tails(wanted, lines)
        return {job_id: "\n".join(text) for job_id, text in found.items()}

    def logs(self, lines: int | None = None) -> str:
        """Return the logs of all jobs as one: time, node, worker, level and text of each line.

        Parameters
        ----------
        lines
            How many of the last lines. Default: all.
        """
        found = ClusterLogs(self._folder).read() if self._folder else []
        return "\n".join(map(str, found[max(0, len(found) - lines) if lines is not None else 0 :]))

    def __repr__(self) -> str:
        failed = textwrap.shorten(str(self.failure or ""), 100, placeholder=" …")
        link = self.dashboard_link if self.status == Status.running else ""
        parts = [
            super().__repr__().removesuffix(")"),
            self.jobs().counts(),
            self.jobs().problem,
            link and f"dashboard {link}{self.tunnel and f' ({self.tunnel})'}",
            failed and f"failed: {failed}",
        ]
        return f"{', '.join(filter(None, parts))})"

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        jobs, gpus, failure, parts = self.jobs(), self.gpus(), self.failure, []
        if failure is not None:
            # It may end with lines of a log
            text = f"<strong>Failed:</strong> {escape(str(failure))}"
            parts.append(f"<div style='color: #b00020; white-space: pre-wrap'>{text}</div>")
        if jobs.problem:
            parts.append(f"<strong>{escape(jobs.problem)}</strong>")
        if self.tunnel:
            text = "The dashboard listens on this machine only. For a browser on yours:"
            parts.append(f"{text} <code>{escape(self.tunnel)}</code>")
        if transport := transport_of(self.scheduler):
            parts.append(f"<strong>Transport:</strong> {escape(transport)}")
        tables: Any = (("Jobs", jobs.counts() or "all over", jobs), ("GPUs", gpus.summary(), gpus))
        for title, summary, table in tables:
            if table:
                head = f"<summary><strong>{title}:</strong> {escape(summary)}</summary>"
                parts.append(f"<details>{head}{table._repr_html_()}</details>")
        # Notebooks put what is in a table to the right
        rows = "".join(
            f"<tr><td colspan='2' style='text-align: left'>{part}</td></tr>" for part in parts
        )
        return str(super()._repr_html_(f"{cluster_status or ''}{rows}"))
