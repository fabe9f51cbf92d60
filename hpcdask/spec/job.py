"""Request of a job, and the names of its workers."""

from __future__ import annotations

from dataclasses import dataclass

from .specs import WorkerSpec


@dataclass(frozen=True)
class JobSpec:
    """Request of a job, from the command line and the environment.

    `scheduler` is ``tls://HOST:PORT`` or ``tcp://HOST:PORT``. `keys` is the file of the cluster's
    credentials. `cluster`, its id or a group's, `job` and `restarts` are in the workers' names.
    `workers` is per node.
    """

    spec: WorkerSpec
    scheduler: str
    keys: str | None
    cluster: str
    job: str
    restarts: int
    workers: int

    def names(self, node: int, nodes: int = 1) -> list[str]:
        """Return the names of the workers on `nodes` nodes, from node number `node` on."""
        numbers = range(node * self.workers, (node + nodes) * self.workers)
        return [worker_name(self.cluster, self.job, self.restarts, number) for number in numbers]


def worker_name(cluster: str, job_id: str, restarts: int, number: int) -> str:
    """Return the name of worker `number`, from 0 over all nodes, in a life of the job."""
    return f"{cluster}-{job_id}-{restarts}-{number}"


def parse_worker_name(cluster: str, name: str) -> tuple[str, int, int] | None:
    """Return job id, restart count and number of a `worker_name`; None for other names."""
    parts = name.removeprefix(f"{cluster}-").rsplit("-", 2)
    if not name.startswith(f"{cluster}-") or len(parts) != 3 or not parts[0]:
        return None
    if not all(part.isascii() and part.isdecimal() for part in parts[1:]):
        return None
    return parts[0], int(parts[1]), int(parts[2])
