"""Devices, nodes and memory of a running cluster, asked of its workers."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import distributed
import numpy as np

from hpcdask.client.connect import connect as connect_to_file
from hpcdask.errors import ClusterError, UsageError
from hpcdask.gpu.devices import NONE_VISIBLE
from hpcdask.gpu.driver import has_nvidia_driver
from hpcdask.workloads import CUPY_INSTALL, Device

WORKER_TIMEOUT_S = 60.0
WARM_TIMEOUT_S = 120.0
WARM_POLL_S = 0.05
#: How often it is seen meanwhile whether there are workers.
LOOK_S = 5.0
#: How long all workers may be paused, since they are over their memory limits.
PAUSED_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Cluster:
    """The workers of a cluster as a workload sees them.

    ``devices`` maps names to numbers of workers; ``n_slots`` are worker threads in all;
    ``memory_nbytes`` is that of all devices, or of all workers without a GPU; ``protocols`` are
    those of the workers' addresses, and ``ucx`` where they exchange over it.
    """

    client: distributed.Client
    device: Device
    devices: dict[str, int]
    n_slots: int
    memory_nbytes: int
    cupy: str | None
    hosts: tuple[str, ...] = ()
    protocols: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = ", ".join(f"{count} x {name}" for name, count in self.devices.items())
        return f"{names} ({f'CuPy {self.cupy}' if self.cupy else f'NumPy {np.__version__}'})"


def probe() -> dict[str, Any]:
    """Tell what this worker can compute on; runs on workers."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpu = visible.strip() not in NONE_VISIBLE if visible is not None else has_nvidia_driver()
    found: dict[str, Any] = {"host": platform.node(), "gpu": gpu, "cuda": False, "why": ""}
    try:
        import cupy

        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        found.update(
            cuda=True,
            cupy=cupy.__version__,
            name=properties["name"].decode(),
            memory=cupy.cuda.Device().mem_info[1],
        )
    except ImportError as exc:
        found["why"] = f"CuPy is missing ({exc}): {CUPY_INSTALL}"
    except Exception as exc:  # the CUDA errors are CuPy's own classes
        found["why"] = f"{type(exc).__name__}: {exc}"
    return found


def choose_device(found: dict[str, dict[str, Any]], wanted: str) -> Device:
    """Decide what to compute on from the answers of `probe`, by worker address.

    A worker that should compute on its GPU and cannot is a UsageError, and so is a mixture.
    """
    if wanted == "cpu":
        return "cpu"
    lacking = {address: f for address, f in found.items() if not f["cuda"]}
    if not lacking:
        return "cuda"
    for address, answer in lacking.items():
        if answer["gpu"]:
            where = f"worker {address} on {answer['host']}"
            raise UsageError(
                f"{where} sees a GPU but cannot use it: {answer['why']}; `hpcdask doctor` there "
                f"tells more"
            )
    if wanted == "auto" and len(lacking) == len(found):
        return "cpu"
    names = ", ".join(f"{address} on {f['host']} ({f['why']})" for address, f in lacking.items())
    raise UsageError(
        f"{len(lacking)} of {len(found)} workers have no CUDA device: {names}; "
        "start all of them on GPUs, or pass --device cpu"
    )


def wait_until_warm(client: distributed.Client, timeout: float = WARM_TIMEOUT_S) -> None:
    """Wait until all workers have exchanged their first data, where they do so by themselves."""
    deadline = time.monotonic() + timeout
    while cold := [worker for worker, warm in client.run(_is_warm).items() if not warm]:
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{len(cold)} workers are not warm after {timeout:g} s, {cold[0]} among them: see "
                f"its log, and whether `hpcdask doctor` finds something there"
            )
        time.sleep(WARM_POLL_S)


def _is_warm(dask_worker: Any) -> bool:
    return bool(getattr(dask_worker, "is_warm", True))


def _over_ucx(client: distributed.Client) -> set[str]:
    return {one for used in client.run(_transports).values() for one in used if one == "ucx"}


def _transports(dask_worker: Any) -> list[str]:
    return list(getattr(dask_worker, "peer_transports", {}).values())


def workers_of(client: distributed.Client) -> dict[str, dict[str, Any]]:
    """Return address to ``name``, ``host``, ``nthreads`` and ``memory_limit`` of all workers.

    The client's own copy, ``scheduler_info()``, is replaced by one without workers at times.
    """
    found: dict[str, dict[str, Any]] = client.run_on_scheduler(_workers)
    return found


def wait_with_workers(client: distributed.Client, what: Any) -> None:
    """Wait for Dask tasks, however long they take, unless no worker has run any for some time."""
    running = there = time.monotonic()
    while True:
        with contextlib.suppress(TimeoutError):
            distributed.wait(what, timeout=LOOK_S)
            return
        now, states = time.monotonic(), client.run_on_scheduler(_states)
        running = now if "running" in states else running
        there = now if states else there
        if now > there + WORKER_TIMEOUT_S:
            raise ClusterError(
                f"the cluster has had no worker for {WORKER_TIMEOUT_S:g} s, so nothing is "
                f"computed: see their logs, or those of their jobs, and start again"
            )
        if states and now > running + PAUSED_TIMEOUT_S:
            raise ClusterError(
                f"all workers ({len(states)}) have been paused for {PAUSED_TIMEOUT_S:g} s, so "
                f"nothing is computed: they use more than `distributed.worker.memory.pause` of "
                f"their memory; take a smaller --size, or give them more memory"
            )


def _states(dask_scheduler: Any) -> list[str]:
    return [worker.status.name for worker in dask_scheduler.workers.values()]


def _workers(dask_scheduler: Any) -> dict[str, dict[str, Any]]:
    names = ("host", "nthreads", "memory_limit")
    return {
        address: {"name": str(worker.name), **{name: getattr(worker, name) for name in names}}
        for address, worker in dask_scheduler.workers.items()
    }


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
    device = choose_device(found, wanted)
    info = workers_of(client)
    n_slots = sum(worker["nthreads"] for worker in info.values())
    where = (
        tuple(sorted({answer["host"] for answer in found.values()})),
        tuple(sorted({address.partition("://")[0] for address in info} | _over_ucx(client))),
    )
    if device == "cuda":
        names = Counter(answer["name"] for answer in found.values())
        memory = sum(answer["memory"] for answer in found.values())
        version = ", ".join(sorted({answer["cupy"] for answer in found.values()}))
        return Cluster(client, device, dict(names), n_slots, memory, version, *where)
    limits = [worker["memory_limit"] or 0 for worker in info.values()]
    # A worker without a limit may use all it finds: nothing to compare with.
    memory = sum(limits) if all(limits) else sys.maxsize
    return Cluster(client, device, {"cpu": len(found)}, n_slots, memory, None, *where)


def connect(scheduler_file: str | None) -> distributed.Client:
    """Connect to the cluster of a scheduler file, or to the one that surrounds this program."""
    if scheduler_file is not None:
        return connect_to_file(scheduler_file)
    return distributed.Client()
