"""Workers, devices and memory of a running cluster, asked of its workers."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import dask
import distributed
import numpy as np

import hpcdask
from hpcdask.errors import ClusterError, UsageError, installing
from hpcdask.gpu.devices import NONE_VISIBLE, visible_gpus
from hpcdask.gpu.driver import cuda_extra, has_nvidia_driver, read
from hpcdask.logs import natural, some
from hpcdask.workloads import Device

WORKER_TIMEOUT_S = 60.0
WARM_TIMEOUT_S = 120.0
#: Seconds without a worker that runs Dask tasks, and how often the scheduler is asked.
IDLE_TIMEOUT_S, POLL_S = 120.0, 5.0


@dataclass(frozen=True)
class Worker:
    """Worker of a cluster; `peers` maps addresses of others to transports but that of `address`."""

    address: str
    name: str
    host: str
    nthreads: int
    peers: Mapping[str, str]

    def transport_from(self, sender: Worker) -> str:
        """Return what this worker fetches data from another one over: ``tls``, ``tcp``, ``ucx``."""
        return self.peers.get(sender.address, self.address.partition("://")[0])


@dataclass(frozen=True)
class Cluster:
    """Workers of a cluster by host and name, which is unique.

    `memory_nbytes` is that of all devices, or of all workers without a GPU. `facts` are the fields
    of a `Measurement` that say on what, with what and when something is measured.
    """

    client: distributed.Client
    device: Device
    memory_nbytes: int
    workers: tuple[Worker, ...]
    facts: dict[str, Any]

    def __str__(self) -> str:
        names = ", ".join(f"{count} x {name}" for name, count in self.facts["devices"].items())
        cupy = self.facts["versions"]["cupy"]
        return f"{names} ({f'CuPy {cupy}' if cupy else f'NumPy {np.__version__}'})"

    @property
    def n_slots(self) -> int:
        """Worker threads in all."""
        return sum(worker.nthreads for worker in self.workers)

    def start(self, number: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Start a Dask task on one worker, and return its future."""
        address = self.workers[number].address
        return self.client.submit(function, *arguments, workers=[address], pure=False)


def inspect(client: distributed.Client, wanted: str = "auto") -> Cluster:
    """Ask all workers of a cluster what they compute on, once they are warm."""
    try:
        client.wait_for_workers(1, timeout=WORKER_TIMEOUT_S)
    except TimeoutError as exc:
        raise UsageError(
            f"the cluster has no worker after {WORKER_TIMEOUT_S:g} s: see the log of the job, or "
            f"of the ranks, that should have brought one"
        ) from exc
    wait_until_warm(client)
    found = client.run(probe)
    device, answers = choose_device(found, wanted), found.values()
    workers = [Worker(address, *answer["worker"]) for address, answer in found.items()]
    workers.sort(key=lambda worker: (worker.host, natural(worker.name)))
    limits = [answer["memory_limit"] for answer in answers]
    memory, cupy, devices = sum(limits) if all(limits) else sys.maxsize, None, {"cpu": len(found)}
    if device == "cuda":
        # several workers may share a GPU, whose memory is there once
        gpus = {answer["uuid"]: answer for answer in answers}.values()
        devices = dict(Counter(answer["model"] for answer in gpus))
        memory = sum(answer["memory"] for answer in gpus)
        cupy = ", ".join(sorted({answer["cupy"] for answer in gpus}))
    packages = hpcdask, dask, distributed, np
    versions = {package.__name__: package.__version__ for package in packages}
    protocols = {worker.address.partition("://")[0] for worker in workers}
    protocols |= {"ucx"} & {one for worker in workers for one in worker.peers.values()}
    facts = {
        "devices": devices,
        "workers": len(workers),
        "threads": sum(worker.nthreads for worker in workers),
        "hosts": tuple(sorted({worker.host for worker in workers})),
        "processors": tuple(sorted({answer["processor"] for answer in answers})),
        "protocols": tuple(sorted(protocols)),
        "versions": versions | {"python": platform.python_version(), "cupy": cupy},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return Cluster(client, device, memory, tuple(workers), facts)


def probe(dask_worker: Any) -> dict[str, Any]:
    """Return what this worker is, and what it can compute on; runs on workers."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    model = re.search(r"^model name\s*: (.*)", read("/proc/cpuinfo"), re.M)  # x86 only
    peers = dict(getattr(dask_worker, "peer_transports", None) or {})
    found: dict[str, Any] = {
        "worker": (str(dask_worker.name), platform.node(), dask_worker.state.nthreads, peers),
        "memory_limit": dask_worker.memory_manager.memory_limit or 0,
        "processor": model[1] if model else platform.machine(),
        "gpu": visible.strip() not in NONE_VISIBLE if visible is not None else has_nvidia_driver(),
    }
    try:
        import cupy

        device = cupy.cuda.Device()
        return found | {
            "cuda": True,
            "cupy": cupy.__version__,
            "model": cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode(),
            "memory": device.mem_info[1],
            "uuid": visible_gpus()[device.id].uuid,
        }
    except ImportError as exc:
        why = f"CuPy is missing ({exc}): {installing(cuda_extra())}"
    except Exception as exc:  # the CUDA errors are CuPy's own classes
        why = f"{type(exc).__name__}: {exc}"
    return found | {"cuda": False, "why": why}


def choose_device(found: Mapping[str, Mapping[str, Any]], wanted: str) -> Device:
    """Decide what to compute on from the answers of `probe`, by worker address.

    Raise UsageError if some workers cannot use a GPU that they should use.
    """
    lacking = {address: answer for address, answer in found.items() if not answer["cuda"]}
    bare = len(lacking) == len(found) and not any(answer["gpu"] for answer in lacking.values())
    if wanted == "cpu" or (wanted == "auto" and bare):
        return "cpu"
    if lacking:
        names = (f"{one} on {told['worker'][1]} ({told['why']})" for one, told in lacking.items())
        raise UsageError(
            f"{len(lacking)} of {len(found)} workers cannot compute on a GPU: {some(names)}; "
            "see `hpcdask doctor` there, start all workers on GPUs, or pass --device cpu"
        )
    return "cuda"


def wait_until_warm(client: distributed.Client) -> None:
    """Wait until all workers have exchanged their first data, where they do so by themselves."""
    deadline = time.monotonic() + WARM_TIMEOUT_S
    is_warm = lambda dask_worker: getattr(dask_worker, "is_warm", True)  # noqa: E731
    while cold := [worker for worker, warm in client.run(is_warm).items() if not warm]:
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{len(cold)} workers are not warm after {WARM_TIMEOUT_S:g} s: see the log of "
                f"{cold[0]}"
            )
        time.sleep(0.05)


def wait(
    cluster: Cluster, futures: Any, what: str = "the Dask tasks", within_s: float = math.inf
) -> None:
    """Wait for Dask tasks; raise ClusterError if they are late, or no worker runs any."""
    start = running = time.monotonic()
    while True:
        with contextlib.suppress(TimeoutError):
            distributed.wait(futures, timeout=min(POLL_S, within_s))
            return
        now, states = time.monotonic(), cluster.client.run_on_scheduler(_states)
        running = now if "running" in states.values() else running
        if now > start + within_s:
            gone = [worker.name for worker in cluster.workers if worker.address not in states]
            raise ClusterError(
                f"{what}: not complete after {within_s:.3g} s; workers left: {some(gone) or 'none'}"
            )
        if now > running + IDLE_TIMEOUT_S:
            raise ClusterError(
                f"no worker could run a Dask task for {IDLE_TIMEOUT_S:g} s: {len(states)} are "
                "there, paused above `distributed.worker.memory.pause` of their memory. Take a "
                "smaller --size, or see the logs of workers and jobs"
            )


def _states(dask_scheduler: Any) -> dict[str, str]:
    return {address: one.status.name for address, one in dask_scheduler.workers.items()}
