"""Rank 0: brings the cluster up, watches over the run, takes everything down.

What happens anywhere arrives as an event in one queue and is handled in one place.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable
from typing import Literal

from hpcdask.bootstrap import orders
from hpcdask.client import scheduler_file
from hpcdask.comm.transport import AUTO
from hpcdask.errors import ClusterError, HpcdaskError, LaunchError, UsageError
from hpcdask.logs import complain, plural, say
from hpcdask.node.host_agent import CLOSE_DEADLINE_S, HURRIED_S, HostAgent
from hpcdask.node.placement import Inventory
from hpcdask.node.profiling import WRITE_DEADLINE_S
from hpcdask.process import TERM_DEADLINE_S
from hpcdask.queues.environment import job_id
from hpcdask.security.credentials import Credentials, create_credentials, to_security

from . import messages, protocol
from .follower import report, start_workers
from .link import Link
from .options import RunRequest
from .plan import Plan, WantedWorkers, make_plan
from .protocol import Broken, Elapsed, Events, RankLost, SchedulerLost
from .rendezvous import Rendezvous
from .run_files import RunFiles
from .scheduler_process import SchedulerProcess
from .user_program import UserProgram

#: Seconds that a program gets after the cluster under it is lost.
LOSS_DEADLINE_S = 2.0
#: Seconds that the other ranks get to leave, beside those for their workers.
LEAVE_S = 3.0
#: Seconds without any worker after which the user is told.
NO_WORKER_NOTICE_S = 5.0
#: Seconds in which ranks may still arrive, to be told to end after an early error.
DISMISS_DEADLINE_S = 10.0


class RunOver(Exception):
    """End of the run, with its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Leader:
    """Agent of rank 0.

    `rendezvous` is where the other ranks look for rank 0, None when there are none; `attached` is
    the line to a program that started this rank itself.
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
        self.state: Literal["starting", "running", "lost"] = "starting"
        self.credentials: Credentials = {}
        self.events = Events()
        self.link = Link(self.rank, self.events)
        self.wanted = WantedWorkers(self.spec)
        self.scheduler = SchedulerProcess(self.events)
        self.warmup = messages.WarmupNotes(self.wanted)
        exists = request.program is not None or attached is not None
        self.program = UserProgram(
            agent, self.events, exists=exists, line=attached, timeout=self.spec.timeout
        )
        script = request.program.name if request.program else ""
        self.files = RunFiles(agent, self.spec.scheduler_file, script)
        self.deadline = time.monotonic() + self.spec.timeout

    def hear(self, message: orders.Message) -> None:
        """Note what the rank's own process tells."""
        self.events.put(message)

    async def lead(self, problem: HpcdaskError | None) -> int:
        """Run everything and return the exit code of the run.

        `problem` is what was found wrong before: the others are told, then all end.
        """
        if self.spec.tls:
            self.credentials = create_credentials()
        else:
            say(
                "warning: --no-tls: any user who reaches a port of this run runs code as you, also "
                "from this machine"
            )
        seconds = HURRIED_S
        try:
            if problem is not None:
                raise problem
            await self._bring_up()
            if self.state == "starting":
                self.state = "running"
            self.program.ready()
            while True:
                self._handle(await self.events.get())
        except RunOver as over:
            code = over.code
            if self.state == "running" and self.program.signalled is None:
                seconds = CLOSE_DEADLINE_S
        except OSError as error:
            complain(f"rank 0 on {self.rank.host} cannot go on: {error}. See hpcdask doctor there")
            code = ClusterError.exit_code
        except HpcdaskError as error:
            complain(error)
            code = error.exit_code
            if error is problem:
                self.deadline = time.monotonic() + min(self.spec.timeout, DISMISS_DEADLINE_S)
                with contextlib.suppress(HpcdaskError, OSError, RunOver):
                    await self._meet()
        missing = self.link.missing
        await self._take_down(code, seconds)
        if missing:
            self.agent.tell(orders.AbortLaunch())
        return code

    # Starting

    async def _bring_up(self) -> None:
        await self.scheduler.open()
        if self.spec.interface != AUTO:
            self._start_scheduler(self.spec.interface)
        seen = await self._meet()
        fabrics = {index: report.fabric for index, report in self.link.reports.items()}
        plan = make_plan(self.spec, self.rank, seen, fabrics)
        if self.spec.interface == AUTO:
            self._start_scheduler(plan.interfaces[self.rank.host])
        messages.tell_cpu(self.spec, seen, plan)
        self.events.start(self.scheduler.listen())
        await self._until(lambda: self.scheduler.started is not None, "the scheduler to start")
        started = self.scheduler.started
        if not isinstance(started, protocol.SchedulerStarted):
            raise ClusterError(started.error if started else "")
        self.wanted.plan(plan.placements)
        self._start_workers(plan, started.address)
        self.program.start(started.address, self.credentials, on_gpus=self.wanted.on_device)
        registered = self.scheduler.registered
        await self._until(
            lambda: self.wanted.are_enough(registered),
            "workers to register",
            lambda: self.wanted.too_late(registered),
        )
        if self.spec.scheduler_file:  # another run may have taken it meanwhile
            await asyncio.to_thread(scheduler_file.check_writable, self.spec.scheduler_file)
        self.agent.parts |= {"scheduler": self.scheduler.pid, **self.program.process()}
        self.files.write(
            started.address, self.credentials, self.scheduler.doors, gpus=self.wanted.on_device
        )
        nodes = len({self.link.reports[index].host for index in plan.placements})
        messages.tell_ready(self.spec, plan, nodes, len(registered), started)
        messages.tell_ways_in(self.spec, started, self.rank.host, has_program=self.program.exists)

    async def _until(
        self, done: Callable[[], bool], what: str, late: Callable[[], LaunchError] | None = None
    ) -> None:
        """Handle events until something is done, while the cluster comes up."""
        while not done():
            try:
                event = await self.events.get(self.deadline)
            except TimeoutError:
                waited = f"waited {self.spec.timeout:g} s for {what}; allow more with --timeout"
                raise (late() if late else LaunchError(waited)) from None
            self._handle(event)

    def _start_scheduler(self, interface: str | None) -> None:
        host = self._host()
        # In a job login nodes shall reach it. On other hosts anybody may work.
        listens = messages.LOOPBACK if host == messages.LOOPBACK or job_id() is None else ""
        self.scheduler.tell(
            protocol.StartScheduler(
                host=None if interface else host,
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
        """Return the address of rank 0: loopback where nobody elsewhere needs it."""
        from distributed.utils import get_ip, get_ip_interface

        if self.spec.interface and self.spec.interface != AUTO:
            with contextlib.suppress(ValueError):  # this rank reports it
                return str(get_ip_interface(self.spec.interface))
        if self.rank.one_node and self.program.exists and not self.spec.scheduler_file:
            return messages.LOOPBACK
        return str(get_ip())

    async def _meet(self) -> dict[int, Inventory]:
        """Collect what every rank sees."""
        self.link.reports[0] = await asyncio.to_thread(report, self.agent)
        if self.rendezvous is not None:
            await self.link.listen(self._host(), self.credentials, self.rendezvous)
            await self._until(
                lambda: self.link.complete,
                "every rank to arrive",
                lambda: self.link.too_late(self.spec.timeout),
            )
            self.link.close()
            self.rendezvous.close()
        return self.link.inventories()

    def _start_workers(self, plan: Plan, scheduler: str) -> None:
        for index, placements in plan.placements.items():
            if index:
                self.link.send(index, protocol.StartWorkers(scheduler, placements))
            else:
                security = to_security(self.credentials)
                self.events.start(
                    start_workers(self.agent, placements, scheduler, security, self.events.put)
                )

    # Events

    def _handle(self, event: object) -> None:
        """Handle an event. Raises RunOver, or the error that ends the run."""
        match event:
            case Broken(error):
                raise error
            case orders.ProgramStarted(pid):
                self.agent.parts["program"] = pid
                self.program.runs = True
                self._see_workers()
            case orders.ProgramEnded(code):
                raise RunOver(ClusterError.exit_code if self.state == "lost" else code)
            case orders.Signal(number):
                self._handle_signal(number)
            case RankLost() | SchedulerLost() | protocol.WorkerFailed():
                self._handle_loss(event)
            case protocol.SchedulerClosed():
                if not self.program.exists:
                    raise RunOver(0)
                self.wanted.give_up()  # the program has shut the cluster down
            case protocol.WorkersChanged():
                self._see_workers()
            case protocol.WorkerWarm(found):
                self.warmup.note(found)
            case Elapsed("program"):
                say(f"the program did not end within {TERM_DEADLINE_S:g} s, and is killed")
                raise RunOver(128 + (self.program.signalled or signal.SIGTERM))
            case Elapsed("loss"):
                raise RunOver(ClusterError.exit_code)
            case Elapsed("no workers") if self.wanted.names and not self.scheduler.registered:
                say("no worker is left: Dask tasks wait until one comes back")

    def _handle_signal(self, number: int) -> None:
        starting = self.state == "starting"
        if self.program.attached and number == signal.SIGINT and not starting:
            return  # meant for the program, which gets it itself, and may go on
        if not self.program.runs and (starting or not self.program.exists):
            raise RunOver(128 + number)
        if self.program.signalled is None:
            self.program.end_by(number)

    def _handle_loss(self, event: RankLost | SchedulerLost | protocol.WorkerFailed) -> None:
        """Do without what is lost, if enough remains; else end the program, and with it the run."""
        if self.state == "lost":
            return
        what = messages.loss_of(event, self.link)
        if not isinstance(event, SchedulerLost):
            name = event.name if isinstance(event, protocol.WorkerFailed) else None
            if self.wanted.enough_without(event.rank, name):
                left = plural(len(self.wanted.names), "worker")
                say(f"{what}. The run goes on with {left} (--workers-min {self.spec.workers_min})")
                return
        advice = " (--workers-min lets it go on)" * (self.spec.workers_min is None)
        what += f". The run ends{'' if isinstance(event, SchedulerLost) else advice}"
        if not self.program.runs and not (self.program.attached and self.state == "running"):
            raise ClusterError(what)
        complain(what)
        self.state = "lost"
        self.program.signal(signal.SIGTERM)
        self.events.put_later(LOSS_DEADLINE_S, "loss")

    def _see_workers(self) -> None:
        if self.state != "running":
            return
        self.files.note(self.scheduler.doors)
        if not self.scheduler.registered:
            self.events.put_later(NO_WORKER_NOTICE_S, "no workers")

    # Ending

    async def _take_down(self, code: int, seconds: float) -> None:
        """End the workers and the other ranks, then the scheduler; this rank is the last."""
        self.files.unlist()
        self.program.signal(signal.SIGKILL)
        for line in await self.scheduler.gpu_usage() if self.wanted.on_device else ():
            say(line)
        self.scheduler.tell(protocol.Silence())
        never_ran = code == UsageError.exit_code and not self.scheduler.registered
        self.link.send_all(protocol.EndRun(code if never_ran else 0, seconds))
        more = WRITE_DEADLINE_S if self.spec.profile != "none" else 0.0
        await asyncio.gather(
            self.agent.close_workers(seconds),
            self.link.wait_for_departure(seconds + LEAVE_S + more),
        )
        await self.scheduler.end()
        if self.rendezvous is not None:
            self.rendezvous.close()
        await self.files.remove()
