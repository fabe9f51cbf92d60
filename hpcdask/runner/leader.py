"""Rank 0: what happens anywhere becomes an event in one queue, and is handled in one place."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, Literal

from distributed.comm import get_address_host
from distributed.utils import get_ip, get_ip_interface

from hpcdask.bootstrap import orders
from hpcdask.bootstrap.environment import own_process
from hpcdask.bootstrap.orders import Message
from hpcdask.client import scheduler_file
from hpcdask.comm.fabric import only_address, unreachable
from hpcdask.comm.transport import AUTO
from hpcdask.comm.warmup import LinkTest, evaluate
from hpcdask.errors import ClusterError, HpcdaskError, LaunchError
from hpcdask.logs import complain, plural, say
from hpcdask.node.host_agent import CLOSE_DEADLINE_S, HURRIED_S, HostAgent
from hpcdask.node.placement import Inventory
from hpcdask.process import TERM_DEADLINE_S, process_status, seconds_since_start
from hpcdask.queues.registry import job_id
from hpcdask.security.credentials import Credentials, create_credentials, to_security
from hpcdask.spec.specs import RunSpec

from . import link
from .link import LOOPBACK, Events, Link, Loss, Rendezvous, SchedulerStarted
from .options import RunRequest
from .plan import WantedWorkers, make_plan
from .program import RunFiles, UserProgram
from .scheduler import SchedulerProcess

#: Seconds that a program gets after the cluster under it is lost.
LOSS_DEADLINE_S = 2.0
#: Seconds that the other ranks get to leave, beside those for their workers.
LEAVE_S = 3.0
#: Seconds in which changes of workers become one change of the run's files.
NOTE_PAUSE_S = 2.0
#: Seconds without any worker after which the user is told.
NO_WORKER_NOTICE_S = 5.0
#: Seconds in which ranks may still arrive, to be told to end after an early error.
DISMISS_DEADLINE_S = 10.0


class RunOver(Exception):
    """End of the run, with its exit code."""


class Leader:
    """Agent of rank 0; `attached` is the line to a program that started this rank itself.

    In the state ``ending``, only the end of the program is waited for: the cluster is lost.
    """

    def __init__(
        self, agent: HostAgent, request: RunRequest, attached: socket.socket | None
    ) -> None:
        self.agent, self.spec, self.rank = agent, request.spec, agent.rank
        self.rendezvous = Rendezvous(self.rank)
        self.state: Literal["starting", "running", "ending"] = "starting"
        self.signalled: int | None = None
        self.credentials: Credentials = {}
        self.events: Events = asyncio.Queue()
        self.link = Link(self.rank, self.events)
        self.wanted = WantedWorkers(self.spec)
        self.scheduler = SchedulerProcess(self.events)
        self.links: dict[str, list[LinkTest]] = {}
        self.program = UserProgram(agent, self.events, request.program is not None, attached)
        script = request.program.name if request.program else ""
        self.files = RunFiles(agent, self.spec.scheduler_file, script)
        self.deadline = time.monotonic() + self.spec.timeout
        agent.listen(self.events.put_nowait)

    async def lead(self, problem: HpcdaskError | None) -> int:
        """Run everything and return the exit code; with a `problem`, the others are only told."""
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
                complain(problem)
                self.deadline = time.monotonic() + min(self.spec.timeout, DISMISS_DEADLINE_S)
                with contextlib.suppress(HpcdaskError, OSError):
                    await self._meet()
                raise RunOver(problem.exit_code)
            await self._bring_up()
            if self.state == "starting":
                self.state = "running"
            self.program.ready()
            while True:
                self._handle(await self.events.get())
        except RunOver as over:
            code = int(over.args[0])
            if self.state == "running" and self.signalled is None:
                seconds = CLOSE_DEADLINE_S
        except OSError as error:
            complain(f"rank 0 on {self.rank.host} cannot go on: {error}. See hpcdask doctor there")
            code = ClusterError.exit_code
        except HpcdaskError as error:
            complain(error)
            code = error.exit_code
        if not self.link.complete:
            self.agent.tell(orders.AbortLaunch())
        await self._take_down(seconds)
        return code

    # Starting

    async def _bring_up(self) -> None:
        if self.spec.interface != AUTO:
            await self._start_scheduler(self.spec.interface)
        if not self.rank.one_node and (warning := unreachable(self._host(), "--interface")):
            say(warning)
        seen = await self._meet()
        plan = make_plan(self.spec, self.rank, seen, job=job_id())
        if self.spec.interface == AUTO:
            await self._start_scheduler(plan.placements[0][0].interface)
        for warning in plan.warnings:
            say(warning)
        await self._until(
            lambda: bool(self.scheduler.started.address),
            lambda: LaunchError(
                f"the scheduler did not start within {self.spec.timeout:g} s. Allow more with "
                f"--timeout"
            ),
        )
        started = self.scheduler.started
        self.wanted = WantedWorkers(self.spec, plan.placements)
        own, access = plan.placements[0], to_security(self.credentials)
        work = self.agent.start_workers(own, started.address, access, self._lose, self._lose)
        self._own_workers = asyncio.create_task(work)
        for index, placements in plan.placements.items():
            self.link.send(index, link.StartWorkers(started.address, placements))
        if self.files.asked:  # of a run that was killed; this one may be over before it has another
            scheduler_file.remove(self.files.asked)
        cluster, gpus = (started.address, self.credentials), plan.on_device
        ready, timeout = not self.program.waits, self.spec.timeout
        self.files.write(self.files.own, *cluster, gpus=gpus, ready=ready, timeout=timeout)
        self.program.start(started.address, self.files.own, on_gpus=gpus)
        registered = self.scheduler.registered
        await self._until(
            lambda: self.wanted.are_enough(registered), lambda: self.wanted.too_late(registered)
        )
        if self.files.asked:  # another run may have taken it meanwhile
            await asyncio.to_thread(scheduler_file.check_writable, self.files.asked)
            self.files.write(self.files.asked, *cluster, gpus=gpus)
        if self.program.attached and (status := process_status(own_process())):
            self._handle(orders.ProgramStarted(int(status[2])))
        self.files.publish(self.scheduler.nannies)
        say(
            f"{plan.describe(self.spec, len(registered))}, ready in {seconds_since_start():.2f} s; "
            f"dashboard http://{started.dashboard_host}:{started.dashboard_port}/status"
        )
        for line in _ways_in(self.spec, started, self.rank.host, has_program=self.program.exists):
            say(line)

    async def _until(self, done: Callable[[], bool], late: Callable[[], LaunchError]) -> None:
        """Handle events until something is done, while the cluster comes up."""
        try:
            async with asyncio.timeout_at(self.deadline):  # of the loop, whose clock is monotonic
                while self.state == "ending" or not done():
                    self._handle(await self.events.get())
        except TimeoutError:
            raise late() from None

    async def _start_scheduler(self, interface: str | None) -> None:
        host = self._host()
        # In a job login nodes shall reach it. On other hosts anybody may work.
        listens = LOOPBACK if host == LOOPBACK or job_id() is None else ""
        dashboard = f"{listens}:{0 if self.spec.port_range else 8787}"
        pid = await self.scheduler.start(
            self.credentials,
            self.spec.port_range,
            host=None if interface else host,
            interface=interface,
            protocol="tls" if self.spec.tls else "tcp",
            local_directory=self.agent.scratch,
            dashboard_address=self.spec.dashboard_address or dashboard,
        )
        self.agent.parts |= {"scheduler": pid}

    def _host(self) -> str:
        """Return the address of rank 0: loopback where nobody elsewhere needs it."""
        if self.spec.interface and self.spec.interface != AUTO:
            with contextlib.suppress(ValueError):  # the scheduler reports it
                return str(get_ip_interface(self.spec.interface))
        if self.rank.one_node and self.program.exists and not self.spec.scheduler_file:
            return LOOPBACK
        return only_address(get_ip())

    async def _meet(self) -> dict[int, Inventory]:
        self.link.note(await asyncio.to_thread(link.RankReport.of, self.agent))
        if self.rank.size > 1:
            self.agent.clean(self.rendezvous.folder)
            await self.rendezvous.open(self.link.serve, self.credentials, self._host())
            await self._until(
                lambda: self.link.complete, lambda: self.link.too_late(self.spec.timeout)
            )
            self.rendezvous.close()
        return self.link.inventories()

    def _lose(self, worker: str, error: str) -> None:
        self.events.put_nowait(Loss.of_worker(self.rank, worker, error))

    # Events

    def _handle(self, event: Message) -> None:
        match event:
            case orders.ProgramStarted(pid):
                self.program.runs = True
                self.agent.parts |= {"program": pid}
                self._see_workers()
            case orders.ProgramEnded(code):
                raise RunOver(ClusterError.exit_code if self.state == "ending" else code)
            case orders.Signal(number):
                self._handle_signal(number)
            case Loss():
                self._handle_loss(event)
            case SchedulerStarted(error=error) if error:
                raise ClusterError(error)
            case link.SchedulerClosed():
                if not self.program.exists:
                    raise RunOver(0)
                self.wanted = WantedWorkers(self.spec)  # the program has shut the cluster down
            case link.WorkersChanged():
                self._see_workers()
            case link.WorkerWarm(found):
                self._note_links(found)

    def _handle_signal(self, number: int) -> None:
        starting = self.state == "starting"
        if self.program.attached and number == signal.SIGINT and not starting:
            return  # meant for the program, which gets it itself, and may go on
        if not self.program.runs and (starting or not self.program.exists):
            raise RunOver(128 + number)
        if self.signalled is not None:
            return
        self.signalled = number
        self.agent.tell(orders.Signal(number))
        if number != signal.SIGINT:
            name = signal.Signals(number).name
            say(f"{name}: the run ends, and the program has {TERM_DEADLINE_S:g} s to end before it")
            asyncio.get_running_loop().call_later(TERM_DEADLINE_S, self._give_up_program, number)

    def _give_up_program(self, number: int) -> None:
        if self.state != "ending":
            say(f"the program did not end within {TERM_DEADLINE_S:g} s, and is killed")
            self.events.put_nowait(orders.ProgramEnded(128 + number))

    def _handle_loss(self, loss: Loss) -> None:
        """Do without what is lost, if enough remains; else end the program, and with it the run."""
        if self.state == "ending":
            return
        what, advice = loss.text, ""
        if loss.rank is not None:
            self.wanted.give_up(loss.rank, loss.worker)
            again = bool(loss.worker) and self.state == "running"
            if self.wanted.suffice(least=1 if again else None):
                say(f"{what}. The run goes on with {plural(len(self.wanted.names), 'worker')}")
                return
            if self.wanted.names and self.spec.workers_min is None:
                advice = " (--workers-min lets it go on)"
        what += f". The run ends{advice}"
        if not self.program.runs:
            raise ClusterError(what)
        complain(what)
        self.state = "ending"
        self.agent.tell(orders.Signal(signal.SIGTERM))
        over = orders.ProgramEnded(ClusterError.exit_code)
        asyncio.get_running_loop().call_later(LOSS_DEADLINE_S, self.events.put_nowait, over)

    def _see_workers(self) -> None:
        if self.state == "running":
            loop = asyncio.get_running_loop()
            loop.call_later(NOTE_PAUSE_S, self.files.note, self.scheduler.nannies)
            if not self.scheduler.registered:
                loop.call_later(NO_WORKER_NOTICE_S, self._tell_if_no_worker_is_left)

    def _tell_if_no_worker_is_left(self) -> None:
        if self.state == "running" and self.wanted.names and not self.scheduler.registered:
            say("no worker is left: Dask tasks wait until one comes back")

    def _note_links(self, found: dict[str, Any]) -> None:
        """Note a worker's first exchanges; once all that are wanted have, say how they went."""
        if found["name"] in self.links:  # it was restarted
            return
        self.links[found["name"]] = [LinkTest(**link) for link in found["links"]]
        tests = [one for links in self.links.values() for one in links]
        if tests and self.wanted.names <= self.links.keys():
            line, warnings = evaluate(tests)
            say(f"warm in {seconds_since_start():.2f} s: {line}")
            for warning in warnings:
                say(f"warning: {warning}")

    # Ending

    async def _take_down(self, seconds: float) -> None:
        """End the workers and the other ranks, then the scheduler; this rank is the last."""
        self.state = "ending"
        self.agent.tell(orders.Signal(signal.SIGKILL))
        await self.scheduler.end_soon()
        for rank in self.link.reports:
            self.link.send(rank, link.EndRun(seconds))
        await asyncio.gather(
            self.agent.close_workers(seconds), self.link.wait_for_departure(seconds + LEAVE_S)
        )
        await self.scheduler.end()
        self.rendezvous.close()
        self.files.remove()


def _ways_in(
    spec: RunSpec, started: SchedulerStarted, host: str, *, has_program: bool
) -> list[str]:
    """Return how clients connect where there is no program, and how a browser elsewhere gets in."""
    lines = []
    if not has_program:
        file = spec.scheduler_file
        way = f'hpcdask.connect("{file}")' if file else f'Client("{started.address}")'
        if spec.tls and not file:
            way = "clients need its keys: start it with --scheduler-file"
        lines.append(f"scheduler at {started.address}: {way}")
    port, listens = started.dashboard_port, started.dashboard_host
    if not has_program or listens != get_address_host(started.address):
        way = f"{LOOPBACK}:{port} {host}" if listens == LOOPBACK else f"{host}:{port} <login node>"
        lines.append(
            f"dashboard from your own machine: ssh -L {port}:{way}, then "
            f"http://localhost:{port}/status"
        )
    return lines
