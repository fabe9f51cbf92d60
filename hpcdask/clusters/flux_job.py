"""The header of Flux's jobs: dask-jobqueue 0.9 has no class for them."""

from __future__ import annotations

from typing import Any

import dask.config

from hpcdask.queues.flux import FluxQueue
from hpcdask.queues.helpers import walltime_text

from .configuration import import_jobqueue

#: What dask-jobqueue's own sections have, with its values.
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("cores", "memory", "processes", "python", "interface", "local-directory")),
    **dict.fromkeys(("shared-temp-directory", "extra", "queue", "account", "env-extra")),
    **dict.fromkeys(("job-extra", "header-skip", "log-directory")),
    "name": "dask-worker",
    "death-timeout": 60,
    "worker-command": "distributed.cli.dask_worker",
    "worker-extra-args": [],
    "shebang": "#!/usr/bin/env bash",
    "walltime": "00:30:00",
    "job-script-prologue": [],
    "job-extra-directives": [],
    "job-directives-skip": [],
    "scheduler-options": {},
}


Job: Any = import_jobqueue("core").Job


class FluxJob(Job):  # type: ignore[misc]
    """A job of one node, as an argument of ``flux batch``."""

    submit_command = "flux batch"
    cancel_command = "flux cancel"
    config_name = "flux"

    def __init__(
        self,
        scheduler: Any = None,
        name: str | None = None,
        queue: str | None = None,
        account: str | None = None,
        walltime: str | None = None,
        config_name: str | None = None,
        **base_class_kwargs: Any,
    ) -> None:
        super().__init__(
            scheduler=scheduler, name=name, config_name=config_name, **base_class_kwargs
        )
        section = dask.config.get(f"jobqueue.{self.config_name}")
        queue, account = queue or section.get("queue"), account or section.get("account")
        walltime = walltime or section.get("walltime")
        options = [f"--job-name={self.job_name}", "--nodes=1", "--nslots=1"]
        options.append(f"--cores-per-slot={self.worker_cores}")
        if queue:
            options.append(f"--queue={queue}")
        if account:
            options.append(f"--bank={account}")
        if walltime:
            limit = FluxQueue.parse_walltime(walltime_text(walltime))
            options.append(f"--time-limit={limit.total_seconds():g}s")
        kept = [one for one in options if not any(skip in one for skip in self.job_directives_skip)]
        lines = [*kept, *self.job_extra_directives]
        self.job_header = "\n".join(f"#flux: {line}" for line in lines)


def configure() -> None:
    """Give Dask's configuration the section ``jobqueue.flux``, below what the user's has."""
    dask.config.update_defaults({"jobqueue": {"flux": DEFAULTS}})
