"""What every rank does: report what it sees, run its workers, leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NoReturn

from hpcdask.bootstrap import ranks, resources
from hpcdask.bootstrap.janitor import Janitor
from hpcdask.bootstrap.ranks import Rank
from hpcdask.client import scheduler_file
from hpcdask.comm import fabric, transport
from hpcdask.comm.fabric import Fabric
from hpcdask.errors import ClusterError, HpcdaskError, root_cause
from hpcdask.gpu.devices import Gpu
from hpcdask.logs import quiet, say
from hpcdask.node import forkserver
from hpcdask.node.forking import Child
from hpcdask.node.gpu_probe import Scout
from hpcdask.node.inventory import View
from hpcdask.node.nanny import RUN_IS_OVER, BoundNanny, make_nanny
from hpcdask.node.placement import Place
from hpcdask.node.preflight import check_extras
from hpcdask.node.signals import ENDING, PASSED_ON, SAME_SIGNAL_S
from hpcdask.node.worker_group import CLOSE_DEADLINE_S
from hpcdask.process import leave, owner_text, process_start
from hpcdask.security import private
from hpcdask.security.credentials import Credentials, to_security
from hpcdask.spec.specs import RunSpec

from . import rendezvous

#: Seconds a program gets after SIGTERM; queueing systems kill after 30.
TERM_DEADLINE_S = 25.0
#: `--interface` that is chosen from what the nodes have.
AUTO = "auto"


class Member:
    """A rank's own part of the cluster.

    Attributes
    ----------
    workers_tell
        Whether each worker writes that it is warm, where nobody says it for all.

    Parameters
    ----------
    spec
        The options of the run.
    rank
        Which one it is.
    janitor
        Removes this rank's folders however it dies.
    program
        The process that waits to become the program, in the rank that has it.
    scout
        Knows which GPUs this rank sees; None where there is no driver.
    """

    workers_tell = False

    def __init__(
        self,
        spec: RunSpec,
        rank: Rank,
        janitor: Janitor,
        scratch: str,
        program: Child | None,
        scout: Scout | None,
    ) -> None:
        self.spec = spec
        self.rank = rank
        self.janitor = janitor
        self.scratch = scratch
        self.program = program
        self.scout = scout
        self.nannies: list[BoundNanny] = []
        self.credentials: Credentials = {}
        self.ending = False
        self.problem: HpcdaskError | None = None
        self.fabric = Fabric()
        self._launcher_fd: int | None = None

    def view(self) -> View:
        """What this rank sees, checked.

        Raises
        ------
        UsageError
            The interface does not exist here, a package is missing, or the GPUs cannot be asked.
        """
        if self.problem is not None:
            raise self.problem
        gpus: list[Gpu] = []
        shown: list[Gpu] | None = []
        if self.spec.device == "cpu":
            self.dismiss_scout()
        if self.scout is not None:
            gpus, shown, self.fabric = self.scout.report()
        elif self.spec.protocol == "ucx" or self.spec.interface == AUTO:
            self.fabric = fabric.look(gpus=False)
        if self.spec.interface and self.spec.interface != AUTO:
            has = fabric.interfaces(every=True)
            transport.check_interface(self.spec.interface, has, self.rank.host)
        check_extras(cuda=bool(gpus))
        return View(
            self.rank.index,
            self.rank.host,
            self.rank.local_index,
            tuple(gpus),
            tuple(sorted(resources.launcher_cores())),
            resources.job_memory(),
            None if shown is None else tuple(shown),
            resources.cpu_quota(),
        )

    def dismiss_scout(self) -> None:
        """End the process that found the GPUs."""
        if self.scout is not None:
            self.scout.dismiss()
            self.scout = None

    def hello(self) -> dict[str, Any]:
        """Who this is, for rank 0: the view, or why there is none."""
        try:
            view = dataclasses.asdict(self.view())
            found: dict[str, Any] = {"view": view, "fabric": dataclasses.asdict(self.fabric)}
        except HpcdaskError as error:
            found = {"error": str(error)}
        return {
            "rank": self.rank.index,
            "host": self.rank.host,
            "pid": os.getpid(),
            **found,
        }

    async def start_workers(
        self,
        places: list[Place],
        scheduler: str,
        failed: Callable[[str, str], None] | None = None,
    ) -> None:
        """Start this rank's workers, each with its nanny.

        `failed` is told which one did not start, and why. Without it, that is raised.
        """
        access = to_security(self.credentials)
        self.nannies = [
            make_nanny(
                self.spec,
                place,
                scheduler=scheduler,
                security=access,
                scratch=self.scratch,
                tells=self.workers_tell,
            )
            for place in places
        ]
        if len(places) == 1:
            self.nannies[0].early = self.scout
        elif self.scout is not None and self.scout.uuid is not None:
            await asyncio.to_thread(self.dismiss_scout)  # before its context is in their way
        self._watchers: list[asyncio.Task[None]] = []

        async def start(nanny: BoundNanny) -> None:
            try:
                await nanny
            except Exception as error:
                if failed is None:
                    raise
                failed(str(nanny.name), root_cause(error))
            else:
                self._watchers.append(asyncio.create_task(self._notice_end(nanny)))

        try:
            await asyncio.gather(*map(start, self.nannies))
        finally:
            await asyncio.to_thread(self.dismiss_scout)

    async def _notice_end(self, nanny: BoundNanny) -> None:
        await nanny.finished()  # type: ignore[no-untyped-call]
        if not self.ending:
            await asyncio.sleep(1)  # the end of the whole run says it too, a moment later
            if not self.ending:
                say(f"worker {nanny.name} on {self.rank.host} has ended")

    async def close_workers(self) -> None:
        """Close the workers, by force after `CLOSE_DEADLINE_S`."""
        self.ending = True
        quiet("CRITICAL")
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_DEADLINE_S + 0.5):
                await asyncio.gather(
                    *(
                        nanny.close(timeout=CLOSE_DEADLINE_S, reason=RUN_IS_OVER)
                        for nanny in self.nannies
                    ),
                    return_exceptions=True,
                )
        forkserver.stop()

    def start_program(self, address: str) -> None:
        """Tell the waiting process to become the program."""
        assert self.program is not None
        file = os.path.join(self.scratch, "scheduler.json")
        scheduler_file.write(file, address, self.credentials, job=None)
        order = {"address": address, "file": file, "threads": len(os.sched_getaffinity(0))}
        try:
            self.program.sock.sendall(json.dumps(order).encode() + b"\n")
        except OSError:
            raise ClusterError(
                f"the program's process on {self.rank.host} was killed before the program started. "
                f"Did the node run out of memory?"
            ) from None

    def end_program(self) -> None:
        """Kill the program if it still runs: the run is over."""
        if self.program is not None:
            self.program.send_signal(signal.SIGKILL)

    def pass_on(self, number: int) -> None:
        """Send the program a signal that this rank got."""
        from_terminal = number == signal.SIGINT and os.isatty(0)
        if self.program is not None and not from_terminal:
            self.program.send_signal(number)

    def handle_signals(
        self, act: Callable[[int], None], repeated: Collection[int] = frozenset()
    ) -> None:
        """Call `act` for the first signal that ends the run; the second ends this rank at once.

        Of those that may be `repeated`, each is told to `act`, and none ends the rank.
        """
        loop = asyncio.get_running_loop()
        first: list[float] = []

        def handle(number: int) -> None:
            if number in repeated:
                act(number)
            elif not first:
                first.append(time.monotonic())
                act(number)
            elif time.monotonic() - first[0] > SAME_SIGNAL_S:
                self.leave(128 + number)

        for number in ENDING:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a shell's `&`
                loop.add_signal_handler(number, handle, number)
        for number in PASSED_ON:
            loop.add_signal_handler(number, self.pass_on, number)
        self.watch_launcher(partial(handle, signal.SIGTERM))

    def watch_launcher(self, act: Callable[[], None]) -> None:
        """Call `act`, or the one of a later call, when the MPI launcher is gone.

        If it was killed, Open MPI's ends nobody, and nobody reads what is said.
        """
        self._without_launcher, launcher = act, ranks.mpi_launcher()
        if launcher is None or self._launcher_fd is not None:
            return
        loop, (pid, start) = asyncio.get_running_loop(), launcher
        try:
            self._launcher_fd = os.pidfd_open(pid)
        except ProcessLookupError:  # it is gone already
            pass
        except (OSError, AttributeError):  # an old kernel, or a Python made for one (conda)
            return
        if self._launcher_fd is None or process_start(pid) != start:
            loop.call_soon(self._lose_launcher)
        else:
            loop.add_reader(self._launcher_fd, self._lose_launcher)

    def _lose_launcher(self) -> None:
        if self._launcher_fd is not None:
            asyncio.get_running_loop().remove_reader(self._launcher_fd)
        if not self.ending:
            self._without_launcher()

    def abort_launch(self, code: int) -> None:
        """End a launch in which some rank never came, and perhaps this one with it."""
        private.remove(self.scratch, owner_text())  # SLURM ends janitors, too
        rendezvous.abort_launch(self.rank, code)

    def leave(self, code: int) -> NoReturn:
        """End this process now. The janitor ends what is still there."""
        private.remove(self.scratch, owner_text())
        leave(code)
