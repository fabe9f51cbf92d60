"""The logs of a cluster's jobs, each by itself, or all as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hpcdask.jobs.folder import ClusterFolder
from hpcdask.jobs.logs import ClusterLogs

from .display import JobTable, chosen_jobs


class JobLogs:
    """Logs of a cluster's jobs."""

    _folder: ClusterFolder | None = None

    jobs: Callable[[], JobTable]

    def job_logs(
        self, *ids: str | int | Iterable[str | int], lines: int | None = None
    ) -> dict[str, str]:
        """The logs of jobs, by id, including those of jobs that are over.

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
        wanted = chosen_jobs(ids, known) if ids else known
        return {job_id: "\n".join(self._folder.tail(job_id, lines)) for job_id in wanted}

    def logs(self, lines: int | None = None) -> str:
        """The logs of all jobs as one, in order: time, node, worker, level and text of each line.

        Parameters
        ----------
        lines
            How many of the last lines. Default: all.
        """
        found = ClusterLogs(self._folder).read() if self._folder else []
        return "\n".join(map(str, found[max(0, len(found) - lines) if lines is not None else 0 :]))
