"""Starts, watches and closes the workers of a node, whoever launched them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import NoReturn

from distributed import Security

from hpcdask.bootstrap.ranks import Rank
from hpcdask.comm.fabric import Fabric
from hpcdask.errors import root_cause
from hpcdask.logs import say, set_log_level
from hpcdask.process import leave, owner_text
from hpcdask.security import private
from hpcdask.spec.specs import WorkerSpec

from . import forkserver, profiling
from .gpu_probe import GpuProbe
from .inventory import Inventory, look
from .nanny import RUN_IS_OVER, BoundNanny, make_nanny
from .placement import WorkerPlacement

#: Seconds a worker gets to close once the run is over.
CLOSE_DEADLINE_S = 2.0


class WorkerGroup:
    """The workers of a rank, or of a job on one node, each with its nanny.

    There is no probe where there is no driver, or once it was dismissed. ``tells``: each worker
    writes that it is warm, where nobody says it for all. ``parts`` are other processes of the rank,
    which can be looked at.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        host: str,
        scratch: str,
        probe: GpuProbe | None,
        *,
        tells: bool = False,
    ) -> None:
        self.nannies: list[BoundNanny] = []
        self.parts: dict[str, int] = {}
        self.probe = probe
        self.scratch = scratch
        self._spec, self._host, self._tells = spec, host, tells
        self._ending = False
        self._watchers: list[asyncio.Task[None]] = []
        self._first = True

    def dismiss_probe(self) -> None:
        """End the process that found the GPUs."""
        if self.probe is not None:
            self.probe.dismiss()
            self.probe = None

    def look(self, rank: Rank) -> tuple[Inventory, Fabric]:
        """Return the inventory of this rank or job, and what joins its devices."""
        self._first = rank.index == 0
        if self._spec.device == "cpu":
            self.dismiss_probe()
        return look(self._spec, rank, self.probe)

    async def start(
        self,
        placements: list[WorkerPlacement],
        scheduler: str,
        security: Security,
        failed: Callable[[str, str], None] | None = None,
    ) -> None:
        """Start the workers.

        ``failed`` is told which one did not start, and why; one that ends later is told to the
        user. Without it, the caller gets the error, and sees to their ends.
        """
        self.nannies = [
            make_nanny(
                self._spec,
                one,
                scheduler=scheduler,
                security=security,
                scratch=self.scratch,
                tells=self._tells,
            )
            for one in placements
        ]
        for nanny in self.nannies[:1]:
            nanny.parts = self.parts
        for nanny in self.nannies:
            nanny.profile = self._spec if self._spec.profile != "none" else None
        if len(placements) == 1:
            self.nannies[0].prestarted = self.probe
        elif self.probe is not None and self.probe.uuid is not None:
            await asyncio.to_thread(self.dismiss_probe)  # before its context is in their way

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

        try:
            await asyncio.gather(*map(start, self.nannies))
        finally:
            await asyncio.to_thread(self.dismiss_probe)

    async def _tell_end(self, nanny: BoundNanny) -> None:
        await nanny.finished()  # type: ignore[no-untyped-call]
        if not self._ending:
            await asyncio.sleep(1)  # the end of the whole run says it too, a moment later
            if not self._ending:
                say(f"worker {nanny.name} on {self._host} has ended")

    async def close(self) -> None:
        """Close the workers, by force after `CLOSE_DEADLINE_S`."""
        self._ending = True
        set_log_level("CRITICAL")
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_DEADLINE_S + 0.5):
                await asyncio.gather(
                    *(
                        nanny.close(timeout=CLOSE_DEADLINE_S, reason=RUN_IS_OVER)
                        for nanny in self.nannies
                    ),
                    return_exceptions=True,
                )
        ends = (profiler.end() for one in self.nannies for profiler in one.profilers)
        if any(await asyncio.gather(*ends)) and self._first:
            say(f"profiles: one file for each worker in {profiling.folder_of(self._spec)}")
        forkserver.stop()

    def leave(self, code: int) -> NoReturn:
        """End this process now. The janitor ends what is still there."""
        private.remove(self.scratch, owner_text())
        leave(code)
