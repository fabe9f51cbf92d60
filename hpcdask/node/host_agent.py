"""Workers of a rank, or of a job on one node, from the first look at the node to their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import NoReturn

import dask.config
from distributed import Security

from hpcdask.bootstrap import orders, resources
from hpcdask.bootstrap.environment import own_process
from hpcdask.bootstrap.orders import MessageStream
from hpcdask.bootstrap.ranks import Rank
from hpcdask.comm import fabric, transport
from hpcdask.errors import HpcdaskError, root_cause
from hpcdask.logs import say, set_log_level
from hpcdask.process import leave, owner_text
from hpcdask.security import ports, private
from hpcdask.security.credentials import check_configuration
from hpcdask.spec.specs import WorkerSpec
from hpcdask.upstream import distributed as upstream

from . import profiling
from .device_worker import RUN_IS_OVER
from .gpu_probe import GpuProbe, ProbeResult
from .nanny import BoundNanny, make_nanny
from .placement import Inventory, WorkerPlacement
from .preflight import check_extras, check_parts
from .scratch import scratch_folder

#: Seconds that workers get to close, with their teardowns, and where something failed or a signal
#: ends the run.
CLOSE_DEADLINE_S, HURRIED_S = 10.0, 2.0


class HostAgent:
    """The workers of a rank or a job here, each with its nanny, and the line to its own process.

    ``tells``: each worker writes that it is warm, where nobody says it for all. ``parts`` are other
    processes of the rank by name, which `hpcdask stacks` looks at.
    """

    def __init__(
        self, line: MessageStream, spec: WorkerSpec, rank: Rank, *, tells: bool = False
    ) -> None:
        self.rank, self.host = rank, rank.host
        self.owner = owner_text(own_process())
        self.spec = spec
        self.nannies: list[BoundNanny] = []
        self.parts: dict[str, int] = {}
        self.scratch = ""
        self._line, self._tells = line, tells
        self._probe: GpuProbe | None = None
        self._ending = False
        self._watchers: list[asyncio.Task[None]] = []

    def tell(self, message: orders.Message) -> None:
        """Order something of the process that owns signals, program and janitor."""
        self._line.send(**message.to_json())

    def prepare(self) -> None:
        """Make the scratch folder and start to look for GPUs. Raises UsageError on bad input."""
        check_configuration()
        ports.use(self.spec.port_range)
        set_log_level()
        upstream.preload_nothing()
        dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
        if self.spec.device != "cpu":
            self._probe = GpuProbe.start()
        try:
            self.scratch = scratch_folder(self.spec.local_directory, self._announce, self.owner)
        except HpcdaskError:
            self.scratch = scratch_folder(None, self._announce, self.owner)  # to end in order
            raise
        check_parts(self.spec)

    def _announce(self, folder: str) -> None:
        self.tell(orders.Clean(folder, "later"))

    async def listen(self, heard: Callable[[orders.Message], None]) -> None:
        """Pass on what the own process tells, until that is gone: then end, as the janitor does."""
        while (message := await self._line.receive()) is not None:
            heard(orders.read(message))
        self.leave(1)

    def look(self) -> tuple[Inventory, fabric.Fabric]:
        """Return what this node has for its workers, and what joins its devices."""
        found = ProbeResult()
        if self._probe is not None:
            found = self._probe.result()
        elif self.spec.protocol == "ucx" or self.spec.interface == transport.AUTO:
            found = ProbeResult(fabric=fabric.look(gpus=False))
        if self.spec.interface and self.spec.interface != transport.AUTO:
            transport.check_interface(self.spec.interface, fabric.interfaces(every=True), self.host)
        check_extras(cuda=bool(found.gpus))
        seen = Inventory(
            self.rank.index,
            self.host,
            self.rank.local_index,
            found.gpus,
            tuple(sorted(os.sched_getaffinity(0))),
            resources.job_memory(),
            resources.cpu_quota(),
        )
        return seen, found.fabric

    async def start_workers(
        self,
        placements: Sequence[WorkerPlacement],
        scheduler: str,
        security: Security,
        failed: Callable[[str, str], None] | None = None,
    ) -> None:
        """Start the workers.

        ``failed`` is called with the name of each worker that does not start, and why; without it
        the error is raised. A worker that ends later is said.
        """
        self.nannies = [
            make_nanny(
                self.spec,
                placement,
                scheduler=scheduler,
                security=security,
                scratch=self.scratch,
                tells=self._tells,
            )
            for placement in placements
        ]
        for nanny in self.nannies[:1]:
            nanny.parts = self.parts

        async def start(nanny: BoundNanny) -> None:
            try:
                await nanny
            except Exception as error:
                if failed is None:
                    raise
                failed(str(nanny.name), root_cause(error))
            else:
                if failed is not None:
                    self._watchers.append(asyncio.create_task(self._tell_end(nanny)))

        await asyncio.gather(*map(start, self.nannies))

    async def _tell_end(self, nanny: BoundNanny) -> None:
        await nanny.finished()  # type: ignore[no-untyped-call]
        if not self._ending:
            await asyncio.sleep(1)  # the end of the whole run says it too, a moment later
            if not self._ending:
                say(f"worker {nanny.name} on {self.host} has ended")

    async def close_workers(self, seconds: float = CLOSE_DEADLINE_S) -> None:
        """Close the workers, by force after some seconds."""
        self._ending = True
        set_log_level("CRITICAL")
        with contextlib.suppress(Exception):
            async with asyncio.timeout(seconds + 0.5):
                await asyncio.gather(
                    *(nanny.close(timeout=seconds, reason=RUN_IS_OVER) for nanny in self.nannies),
                    return_exceptions=True,
                )
        profilers = [profiler for nanny in self.nannies for profiler in nanny.profilers]
        if any(await asyncio.gather(*(profiler.end() for profiler in profilers))):
            say(f"profiles: one file for each worker in {profiling.folder_of(self.spec)}")

    def leave(self, code: int) -> NoReturn:
        """End this process now, whatever its threads wait for; the rank's own process follows."""
        private.remove(self.scratch, self.owner)
        leave(code)
