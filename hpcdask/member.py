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

import dask.config

from . import rendezvous, template
from .bootstrap import ranks, resources
from .bootstrap.janitor import Janitor
from .bootstrap.ranks import Rank
from .children import PASSED_ON, Child, Nursery
from .client import scheduler_file
from .comm import fabric, transport, ucx_hooks
from .comm.fabric import Fabric
from .errors import ClusterError, HpcdaskError, LaunchError, root_cause
from .gpu import devices, driver
from .gpu.devices import Gpu, View
from .logs import quiet, say
from .nanny import RUN_IS_OVER, BoundNanny, Place, check_extras, make_nanny
from .process import leave, owner_text, process_start
from .scout import Scout, has_peers
from .scratch import scratch_folder
from .security import private
from .security.credentials import Credentials, to_security
from .spec.specs import RunSpec, WorkerSpec

#: Seconds a worker gets to close once the run is over.
CLOSE_DEADLINE_S = 2.0
#: Seconds a program gets after SIGTERM; queueing systems kill after 30.
TERM_DEADLINE_S = 25.0
#: A launcher and a terminal may both send the first signal.
SAME_SIGNAL_S = 0.3
#: `--interface` that is chosen from what the nodes have.
AUTO = "auto"
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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
        template.stop()

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


def start_template(spec: WorkerSpec, scratch: str, nursery: Nursery) -> None:
    """Fork the template of this rank's workers. This is the last fork of a rank."""
    cuda = spec.device != "cpu" and driver.has_nvidia_driver()
    likely = cuda and spec.protocol == "auto" and has_peers(ranks.detect())

    def in_child() -> None:
        nursery.close_in_child()
        if spec.protocol == "ucx" or likely:
            ucx_hooks.install(dask.config.get("distributed.nanny.environ", None))

    # dask-cuda, which has the device's store, takes 0.2 s to import it; it makes no CUDA call
    template.start(scratch, in_child, ["cuda.core"] if cuda else [])
    if cuda:
        devices.start_nvml()


def new_scratch(spec: WorkerSpec, janitor: Janitor) -> str:
    """This rank's private folder, which the janitor knows of."""

    def announce(path: str) -> None:
        try:
            janitor.remove_at_end(path)
        except OSError:
            raise LaunchError(
                "this rank's janitor, the process that removes its files at the end, was killed. "
                "Start the run again"
            ) from None

    return scratch_folder(spec.local_directory, announce)
