"""Agent of a rank, or of a job on one node, from the first look at the node to the workers' end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from importlib.util import find_spec
from typing import Any, NoReturn

import dask.config
from distributed import Security

from hpcdask.bootstrap import orders, resources
from hpcdask.bootstrap.environment import own_process
from hpcdask.bootstrap.ranks import Rank
from hpcdask.bootstrap.stream import MessageStream
from hpcdask.bootstrap.supervisor import CONTEXT
from hpcdask.comm import fabric, transport
from hpcdask.comm.fabric import Fabric
from hpcdask.errors import DeviceError, HpcdaskError, MissingExtra, UsageError, root_cause
from hpcdask.gpu.devices import Gpu, visible_gpus
from hpcdask.gpu.driver import answer_deadline_s, cuda_extra, has_nvidia_driver
from hpcdask.logs import complain, set_log_level
from hpcdask.process import leave, owner_text
from hpcdask.security import ports
from hpcdask.security.credentials import check_configuration
from hpcdask.spec.specs import WorkerSpec
from hpcdask.upstream import distributed as upstream

from .device_worker import RUN_IS_OVER
from .nanny import BoundNanny, make_nanny
from .placement import Inventory, WorkerPlacement
from .scratch import scratch_folder

#: Seconds that workers get to close, with their teardowns, and where something failed or a signal
#: ends the run.
CLOSE_DEADLINE_S, HURRIED_S = 10.0, 2.0
#: GPUs that this process may use, and what joins them.
Seen = tuple[tuple[Gpu, ...], Fabric]


def run_agent(
    line: socket.socket,
    work: Callable[..., Awaitable[int]],
    rank: Rank,
    spec: WorkerSpec,
    *args: Any,
) -> NoReturn:
    """Do the work of an agent, and end this process with the exit code that it returns."""

    async def run() -> NoReturn:
        agent = HostAgent(await MessageStream.over(line), spec.configured(), rank)
        try:
            code = await work(agent, *args)
        except HpcdaskError as error:
            complain(error)
            code = error.exit_code
        except Exception:
            traceback.print_exc()
            code = 1
        agent.leave(code)

    upstream.run_in_loop(run())


class HostAgent:
    """Agent of a rank or a job here; ``parts`` are more processes, which the first nanny shows."""

    def __init__(self, line: MessageStream, spec: WorkerSpec, rank: Rank) -> None:
        self.rank, self.host = rank, rank.host
        self.owner = owner_text(own_process())
        self.spec = spec
        self.nannies: list[BoundNanny] = []
        self.parts: dict[str, int] = {}
        self.scratch = ""
        self._line = line
        self._probe: Future[Seen] | None = None

    def tell(self, message: orders.Message) -> None:
        """Order something of the process that owns signals, program and janitor."""
        self._line.send(message)

    def clean(self, path: str) -> None:
        """Tell the janitor to remove a path when the rank is gone."""
        self.tell(orders.Clean(path))

    def listen(self, heard: Callable[[orders.Message], None]) -> None:
        """Pass on what the own process tells; once that is gone, end as the janitor does."""

        async def listen() -> None:
            async for message in self._line:
                heard(message)
            self.leave(1)

        self._listening = asyncio.create_task(listen())

    def leave(self, code: int) -> NoReturn:
        """End this process now, whatever its threads wait for; the rank's own process follows."""
        self.tell(orders.Leaving(code))
        leave(code)

    def prepare(self) -> None:
        """Make the scratch folder and start to look for GPUs. Raises UsageError on bad input."""
        check_configuration()
        ports.use(self.spec.port_range)
        set_log_level()
        upstream.preload_nothing()
        dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
        if self.spec.device != "cpu" and (has_nvidia_driver() or find_spec("pynvml")):
            self._probe = start_probe()
        self.scratch = scratch_folder(self.spec.local_directory, self.clean, self.owner)

    def look(self) -> Inventory:
        """Return what this node has for its workers."""
        gpus, links = tuple[Gpu, ...](), Fabric()
        if self._probe is not None:
            gpus, links = wait_for_probe(self._probe)
        elif self.spec.protocol == "ucx" or self.spec.interface == transport.AUTO:
            links = fabric.look(gpus=False)
        if gpus and not (find_spec("cuda") and find_spec("cuda.bindings")):
            raise MissingExtra("cuda-bindings", cuda_extra(), "a worker on a GPU")
        return Inventory(
            self.rank.index,
            self.host,
            self.rank.local_index,
            gpus,
            tuple(sorted(os.sched_getaffinity(0))),
            resources.job_memory(),
            resources.cpu_quota(),
            links,
        )

    async def start_workers(
        self,
        placements: Sequence[WorkerPlacement],
        scheduler: str,
        security: Security,
        failed: Callable[[str, str], None],
        lost: Callable[[str, str], None] = lambda name, why: None,
    ) -> None:
        """Start the workers; tell those that `failed` to, later those that are `lost`, and why."""

        async def start(one: WorkerPlacement) -> None:
            try:
                nanny = make_nanny(self.spec, one, scheduler, security, self.scratch)
                nanny.give_up = partial(lost, one.name)
                if not self.nannies:
                    nanny.parts = self.parts
                self.nannies.append(nanny)
                await nanny
            except Exception as error:
                failed(one.name, root_cause(error))

        await asyncio.gather(*map(start, placements))

    async def close_workers(self, seconds: float = CLOSE_DEADLINE_S) -> None:
        """Close the workers, by force after some seconds."""
        set_log_level("CRITICAL")
        closing = [nanny.close(timeout=seconds, reason=RUN_IS_OVER) for nanny in self.nannies]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*closing, return_exceptions=True), seconds + 0.5)


def start_probe() -> Future[Seen]:
    """Look for GPUs in a process of its own, while this one goes on: the driver may hang."""
    return ProcessPoolExecutor(1, CONTEXT).submit(look_for_gpus)


def wait_for_probe(probe: Future[Seen]) -> Seen:
    """Return what the probe saw. Raises DeviceError if it failed or does not answer in time."""
    advice = "see whether nvidia-smi works on this node, and leave the node out if it does not"
    try:
        return probe.result(seconds := answer_deadline_s())
    except TimeoutError:
        text = f"the NVIDIA driver did not answer within {seconds:g} s"
        raise DeviceError(f"{text}: {advice}") from None
    except BrokenProcessPool:
        raise DeviceError(f"the process that looks for GPUs has died: {advice}") from None


def look_for_gpus() -> Seen:
    try:
        gpus = tuple(visible_gpus())
        return gpus, fabric.look(gpus=bool(gpus), own={gpu.uuid for gpu in gpus})
    except UsageError as error:
        raise DeviceError(str(error)) from None
    except Exception as error:  # NVML's, of a GPU that is broken
        raise DeviceError(f"the NVIDIA driver fails: {type(error).__name__}: {error}") from None
