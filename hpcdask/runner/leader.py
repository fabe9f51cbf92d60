"""Rank 0: brings the cluster up, watches over the run, takes everything down.

What happens anywhere arrives as an `Event` in one queue and is decided in one place.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable

from hpcdask.bootstrap.orders import AbortLaunch, Message, ProgramEnded, ProgramStarted, Signal
from hpcdask.client import scheduler_file
from hpcdask.comm.transport import AUTO
from hpcdask.errors import ClusterError, HpcdaskError, LaunchError, UsageError
from hpcdask.logs import complain, plural, say
from hpcdask.node.host_agent import CLOSE_DEADLINE_S, HURRIED_S, HostAgent
from hpcdask.node.inventory import Inventory
from hpcdask.node.placement import WorkerPlacement
from hpcdask.node.profiling import WRITE_DEADLINE_S
from hpcdask.process import TERM_DEADLINE_S
from hpcdask.queues.environment import job_id
from hpcdask.security.credentials import Credentials, create_credentials, to_security

from . import protocol
from .arrivals import Arrivals
from .assignment import Plan, make_plan
from .events import Event, Events, Interrupted, ProgramOver
from .follower import report, start_workers
from .messages import (
    LOOPBACK,
    WarmupNotes,
    failure_of,
    host_of,
    loss_of,
    tell_cpu,
    tell_ready,
    tell_ways_in,
)
from .options import RunRequest
from .rendezvous import Rendezvous
from .run_files import RunFiles
from .scheduler_process import SchedulerProcess
from .user_program import UserProgram
from .wanted_workers import WantedWorkers

#: Seconds that a program gets after the cluster under it is lost.
LOSS_DEADLINE_S = 2.0
#: Seconds without any worker after which the user is told.
NO_WORKER_NOTICE_S = 5.0


class Leader:
    """Agent of rank 0.

    `rendezvous` is where the other ranks look for rank 0, None when there are none; `attached` is
    the line to a program that started this rank itself. `problem` is what was found wrong before:
    the others are told, then all end.
    """

    def __init__(
        self,
        agent: HostAgent,
        request: RunRequest,
        rendezvous: Rendezvous | None,
        attached: socket.socket | None,
    ) -> None:
        self.agent, self.spec, self.rank = agent, request.spec, agent.rank
        self.rendezvous = rendezvous
        self.credentials: Credentials = {}
        self.events = Events()
        self.arrivals = Arrivals(self.rank, self.events)
        self.wanted = WantedWorkers(self.spec)
        self.scheduler = SchedulerProcess(self.events, WarmupNotes(self.wanted).note)
        exists = request.program is not None or attached is not None
        self.program = UserProgram(
            agent, self.events, exists=exists, line=attached, timeout=self.spec.timeout
        )
        self.address = ""
        script = request.program.name if request.program else ""
        self.files = RunFiles(agent, self.spec.scheduler_file, script)
        self.dashboard_host, self.dashboard = "", 0
        self.deadline = time.monotonic() + self.spec.timeout
        self.hurried = True

    def hear(self, message: Message) -> None:
        """Turn what the rank's own process tells into events."""
        match message:
            case Signal(number):
                self.events.happened("signal", number)
            case ProgramStarted(pid):
                self.agent.parts["program"] = pid
                self.program.runs = True
                self.events.happened("workers")
            case ProgramEnded(code):
                self.events.happened("program", code)

    async def lead(self, problem: HpcdaskError | None) -> int:
        """Run everything and return the exit code of the run."""
        if self.spec.tls:
            self.credentials = create_credentials()
        else:
            say(
                "warning: --no-tls: any user who reaches a port of this run runs code as you, also "
                "from this machine"
            )
        try:
            if problem is not None:
                raise problem
            await self._bring_up()
            code = await self._watch()
            self.hurried = self.program.signalled is not None
        except OSError as error:
            complain(f"rank 0 on {self.rank.host} cannot go on: {error}. See hpcdask doctor there")
            code = ClusterError.exit_code
        except HpcdaskError as error:
            complain(error)
            code = error.exit_code
            if error is problem:
                await self._gather_to_dismiss()
        except Interrupted as stop:
            code = 128 + stop.number
            await self._interrupt_program(stop.number)
        except ProgramOver as over:
            code = over.code
        missing = self.arrivals.missing
        await self._take_down(code)
        if missing:
            self.agent.tell(AbortLaunch())
        return code

    async def _bring_up(self) -> None:
        await self.scheduler.open()
        if self.spec.interface != AUTO:
            self._start_scheduler(self.spec.interface)
        seen = await self._meet()
        fabrics = {index: report.fabric for index, report in self.arrivals.reports.items()}
        plan = make_plan(self.spec, self.rank, seen, fabrics)
        if self.spec.interface == AUTO:
            self._start_scheduler(plan.interfaces[self.rank.host])
        tell_cpu(self.spec, seen, plan)
        self.events.start(self.scheduler.listen())
        started = (await self._next("the scheduler to start", {"scheduler"})).value
        if isinstance(started, protocol.SchedulerFailed):
            raise ClusterError(started.error)
        self.address, self.dashboard_host = started.address, started.dashboard_host
        self.dashboard = started.dashboard_port
        self.wanted.plan(plan.placements)
        self._start_workers(plan.placements)
        self.program.start(self.address, self.credentials, on_gpus=self.wanted.on_device)
        while not self.wanted.are_enough(self.scheduler.registered):
            await self._next(
                "workers to register",
                {"workers"},
                lambda: self.wanted.too_late(self.scheduler.registered),
            )
        if self.spec.scheduler_file:  # another run may have taken it meanwhile
            await asyncio.to_thread(scheduler_file.check_writable, self.spec.scheduler_file)
        self.agent.parts |= {"scheduler": self.scheduler.pid, **self.program.process()}
        self.files.write(
            self.address, self.credentials, self.scheduler.doors, gpus=self.wanted.on_device
        )
        self._announce(plan)

    def _start_scheduler(self, interface: str | None) -> None:
        # In a job login nodes shall reach it. On other hosts anybody may work.
        listens = LOOPBACK if self._host() == LOOPBACK or job_id() is None else ""
        self.scheduler.tell(
            protocol.StartScheduler(
                host=None if interface else self._host(),
                interface=interface,
                protocol="tls" if self.spec.tls else "tcp",
                credentials=self.credentials,
                dashboard=self.spec.dashboard_address
                or f"{listens}:{0 if self.spec.port_range else 8787}",
                scratch=self.agent.scratch,
                port_range=self.spec.port_range,
            )
        )

    def _host(self) -> str:
        """Address of rank 0: loopback where nobody elsewhere needs it."""
        from distributed.utils import get_ip, get_ip_interface

        if self.spec.interface and self.spec.interface != AUTO:
            with contextlib.suppress(ValueError):  # this rank reports it
                return str(get_ip_interface(self.spec.interface))
        if self.rank.one_node and self.program.exists and not self.spec.scheduler_file:
            return LOOPBACK
        return str(get_ip())

    async def _meet(self) -> dict[int, Inventory]:
        """Collect what every rank sees."""
        self.arrivals.reports[0] = await asyncio.to_thread(report, self.agent)
        if self.rendezvous is not None:
            await self.arrivals.listen(self._host(), self.credentials, self.rendezvous)
            while not self.arrivals.complete:
                await self._next(
                    "every rank to arrive",
                    {"arrived"},
                    lambda: self.arrivals.too_late(self.spec.timeout),
                )
            self.arrivals.close()
            self.rendezvous.close()
        return self.arrivals.inventories()

    async def _interrupt_program(self, number: int) -> None:
        """Pass on a signal that came while the cluster was coming up, and give a moment to end."""
        self.program.signal(number)
        deadline = time.monotonic() + LOSS_DEADLINE_S
        with contextlib.suppress(TimeoutError):
            while self.program.runs and (await self.events.get(deadline)).what != "program":
                pass

    async def _gather_to_dismiss(self) -> None:
        """After an early error: let the others arrive, so that they can be told to end."""
        self.deadline = time.monotonic() + min(self.spec.timeout, 10)
        with contextlib.suppress(HpcdaskError, OSError, Interrupted):
            await self._meet()

    def _start_workers(self, placements: dict[int, list[WorkerPlacement]]) -> None:
        for index in placements.keys() - {0}:
            self.arrivals.send(index, protocol.StartWorkers(self.address, placements[index]))

        def failed(name: str | None, text: str) -> None:
            self.events.happened("failed", (0, name, text))

        if 0 in placements:
            security = to_security(self.credentials)
            self.events.start(
                start_workers(self.agent, placements[0], self.address, security, failed)
            )

    def _announce(self, plan: Plan) -> None:
        host = LOOPBACK if self.dashboard_host == LOOPBACK else host_of(self.address)
        nodes = len({self.arrivals.reports[index].host for index in plan.placements})
        registered = len(self.scheduler.registered)
        tell_ready(self.spec, plan, nodes, registered, f"{host}:{self.dashboard}")
        where = (self.address, host, self.dashboard, self.rank.host)
        tell_ways_in(self.spec, *where, has_program=self.program.exists)

    async def _next(
        self, what: str, wanted: set[str], too_late: Callable[[], LaunchError] | None = None
    ) -> Event:
        """The next event of a kind, while the cluster comes up."""
        while True:
            try:
                event = await self.events.get(self.deadline)
            except TimeoutError:
                waited = f"waited {self.spec.timeout:g} s for {what}; allow more with --timeout"
                raise (too_late() if too_late else LaunchError(waited)) from None
            if event.what in wanted:
                return event
            match event.what:
                case "broken":
                    raise event.value
                case "signal":
                    raise Interrupted(event.value)
                case "program":
                    raise ProgramOver(event.value)
                case "lost":
                    self.arrivals.forget(event.value)
                    who = self.arrivals.name(event.value)
                    raise ClusterError(
                        f"{who} ended while the cluster came up; see what it printed"
                    )
                case "failed":
                    index, name, _ = event.value
                    failure = failure_of(event, self.arrivals)
                    if not self.wanted.enough_without(index, name):
                        raise ClusterError(failure)
                    say(failure)
                case "scheduler-lost":
                    raise ClusterError(
                        "the scheduler's process ended while the cluster came up: see whether the "
                        "node ran out of memory"
                    )

    async def _watch(self) -> int:
        """From ready to the end of the program, or of the cluster."""
        self.program.ready()
        lost = False
        while True:
            event = await self.events.get()
            match event.what:
                case "broken":
                    raise event.value
                case "program":
                    return ClusterError.exit_code if lost else int(event.value)
                case "gave-up":
                    return ClusterError.exit_code
                case "deadline":
                    say(f"the program did not end within {TERM_DEADLINE_S:g} s, and is killed")
                    return 128 + (self.program.signalled or signal.SIGTERM)
                case "signal" if not self.program.exists:
                    return 128 + int(event.value)
                case "signal" if self.program.attached and event.value == signal.SIGINT:
                    pass  # meant for the program, which gets it itself, and may go on
                case "signal" if self.program.signalled is None:
                    self.program.end_by(event.value)
                case "lost" | "failed" if not lost and self._goes_on_after(event):
                    pass
                case "lost" | "scheduler-lost" | "failed" if not lost:
                    complain(loss_of(event, self.arrivals))
                    if not self.program.exists:
                        return ClusterError.exit_code
                    lost = True
                    self.program.signal(signal.SIGTERM)
                    self.events.later(LOSS_DEADLINE_S, "gave-up")
                case "scheduler-closed" if not self.program.exists:
                    return 0
                case "scheduler-closed":
                    self.wanted.give_up()  # the program has shut the cluster down
                case "workers" | "still-no-workers":
                    self._see_workers(event.what)

    def _see_workers(self, what: str) -> None:
        self.files.note(self.scheduler.doors)
        if self.scheduler.registered:
            return
        if what == "workers":
            self.events.later(NO_WORKER_NOTICE_S, "still-no-workers")
        elif self.wanted.names:
            say("no worker is left: Dask tasks wait until one comes back")

    def _goes_on_after(self, event: Event) -> bool:
        """Do without a rank that is gone or a worker that failed, if enough remain."""
        if event.what == "failed":
            index, name, _ = event.value
            enough = self.wanted.enough_without(index, name)
            if enough:
                say(failure_of(event, self.arrivals))
            return enough
        self.arrivals.forget(event.value)
        enough = self.wanted.enough_without(event.value)
        if enough:
            say(
                f"{self.arrivals.name(event.value)} is gone; the run goes on with "
                f"{plural(len(self.wanted.names), 'worker')} "
                f"(--workers-min {self.spec.workers_min})"
            )
        return enough

    async def _take_down(self, code: int) -> None:
        """End the workers and the other ranks, then the scheduler; this rank is the last."""
        self.files.unlist()
        self.program.signal(signal.SIGKILL)
        for line in await self.scheduler.gpu_usage() if self.wanted.on_device else ():
            say(line)
        self.scheduler.tell(protocol.Silence())
        never_ran = code == UsageError.exit_code and not self.scheduler.registered
        seconds = HURRIED_S if self.hurried else CLOSE_DEADLINE_S
        self.arrivals.send_all(protocol.EndRun(code if never_ran else 0, seconds))
        more = WRITE_DEADLINE_S if self.spec.profile != "none" else 0.0
        await asyncio.gather(
            self.agent.close_workers(seconds), self.arrivals.all_gone(seconds + more)
        )
        await self.scheduler.end()
        if self.rendezvous is not None:
            self.rendezvous.close()
        await self.files.remove()
