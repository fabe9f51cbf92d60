"""Part of every rank: report what it sees, run its workers, leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import partial

from hpcdask.bootstrap.janitor import Janitor
from hpcdask.bootstrap.ranks import Rank
from hpcdask.client import scheduler_file
from hpcdask.errors import ClusterError, HpcdaskError
from hpcdask.node.forking import ForkedProcess
from hpcdask.node.gpu_probe import GpuProbe
from hpcdask.node.placement import WorkerPlacement
from hpcdask.node.signals import Signals
from hpcdask.node.worker_group import WorkerGroup
from hpcdask.process import owner_text
from hpcdask.queues.environment import job_id
from hpcdask.security import private
from hpcdask.security.credentials import Credentials, to_security
from hpcdask.spec.specs import RunSpec

from . import protocol, rendezvous
from .arrivals import RankReport


class RankAgent:
    """A rank's own part of the cluster.

    `program` waits to become the user's program, in the rank that has it. `probe` is None without a
    driver. `problem` is what was found wrong here before. `credentials` are empty without TLS.
    """

    def __init__(
        self,
        spec: RunSpec,
        rank: Rank,
        janitor: Janitor,
        scratch: str,
        program: ForkedProcess | None,
        probe: GpuProbe | None,
        problem: HpcdaskError | None = None,
    ) -> None:
        self.spec = spec
        self.rank = rank
        self.janitor = janitor
        self.scratch = scratch
        self.program = program
        self.credentials: Credentials = {}
        self.workers = WorkerGroup(spec, rank.host, scratch, probe)
        self.signals = Signals(self.workers.leave, self.pass_on)
        self._problem = problem

    def report(self) -> RankReport:
        """Return the rank's report to rank 0: what it sees, or why there is nothing."""
        me = partial(RankReport, self.rank.index, self.rank.host, os.getpid())
        try:
            if self._problem is not None:
                raise self._problem
            seen, fabric = self.workers.look(self.rank)
        except HpcdaskError as error:
            return me(error=str(error))
        return me(inventory=seen, fabric=fabric)

    async def start_workers(
        self,
        placements: list[WorkerPlacement],
        scheduler: str,
        failed: Callable[[str | None, str], None],
    ) -> None:
        """Start this rank's workers; `failed` is told which one did not start, or none, and why."""
        try:
            security = to_security(self.credentials)
            await self.workers.start(placements, scheduler, security, failed)
        except Exception as error:
            failed(None, f"{type(error).__name__}: {error}")

    async def close_workers(self) -> None:
        """Close them: the run is over."""
        self.signals.forget_launcher()
        await self.workers.close()

    def start_program(self, address: str, on_gpus: bool) -> None:
        """Tell the waiting process to become the program."""
        assert self.program is not None
        order = self.order_to_start(address, on_gpus)
        try:
            self.program.sock.sendall(json.dumps(order.to_json()).encode() + b"\n")
        except OSError:
            raise ClusterError(
                f"the program's process on {self.rank.host} was killed before the program started. "
                f"Did the node run out of memory?"
            ) from None

    def order_to_start(self, address: str, on_gpus: bool) -> protocol.StartProgram:
        """Return the order to start the program, with a scheduler file of its own."""
        file = os.path.join(self.scratch, "scheduler.json")
        scheduler_file.write(file, address, self.credentials, job=job_id())
        return protocol.StartProgram(address, on_gpus, file, len(os.sched_getaffinity(0)))

    def end_program(self) -> None:
        """Kill the program if it still runs: the run is over."""
        if self.program is not None:
            self.program.send_signal(signal.SIGKILL)

    def pass_on(self, number: int) -> None:
        """Send the program a signal that this rank got."""
        from_terminal = number == signal.SIGINT and os.isatty(0)
        if self.program is not None and not from_terminal:
            self.program.send_signal(number)

    def abort_launch(self, code: int) -> None:
        """End a launch in which some rank never came, and perhaps this one with it."""
        private.remove(self.scratch, owner_text())  # SLURM ends janitors, too
        rendezvous.abort_launch(self.rank, code)
