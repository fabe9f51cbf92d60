"""Rank 0: brings the cluster up, watches over the run, takes everything down.

What happens anywhere arrives as an `Event` in one queue and is decided in one place.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from hpcdask.bootstrap import resources
from hpcdask.client import scheduler_file
from hpcdask.comm.fabric import Fabric
from hpcdask.comm.topology import NodeLinks
from hpcdask.comm.transport import AUTO, Choice, choose, choose_interface
from hpcdask.comm.warmup import LinkTest, evaluate
from hpcdask.errors import ClusterError, HpcdaskError, LaunchError, UsageError
from hpcdask.gpu import memory_plan
from hpcdask.logs import complain, say
from hpcdask.node.channel import MessageStream
from hpcdask.node.forking import ForkedProcess
from hpcdask.node.inventory import Inventory
from hpcdask.node.placement import WorkerPlacement, owned_cores, with_transport
from hpcdask.process import mark, seconds_since_start
from hpcdask.queues.environment import job_id
from hpcdask.security.credentials import create_credentials, to_security

from . import assignment
from .agent import TERM_DEADLINE_S, RankAgent
from .assignment import place_workers
from .control import ControlServer
from .events import Event, _Interrupted
from .rendezvous import Rendezvous

#: Seconds that a program gets after the cluster under it is lost.
LOSS_DEADLINE_S = 2.0
#: Seconds without any worker after which the user is told.
NO_WORKER_NOTICE_S = 5.0
#: Seconds that the other ranks get to leave.
LEAVE_DEADLINE_S = 3.0
LOOPBACK = "127.0.0.1"


class Leader:
    """Rank 0's view of the run.

    Parameters
    ----------
    member
        Rank 0's own part.
    rendezvous
        Where the other ranks look for the note; None when there are none.
    scheduler
        The process that waits to become the scheduler.
    has_program
        Whether some rank runs a program.
    attached
        The line to the program that started this rank itself, or None. Its end is the program's.
    early_error
        Bad input that was found already: the others are told, then all end.
    """

    def __init__(
        self,
        member: RankAgent,
        rendezvous: Rendezvous | None,
        scheduler: ForkedProcess,
        *,
        has_program: bool,
        attached: ForkedProcess | None = None,
        early_error: HpcdaskError | None = None,
    ) -> None:
        self.member = member
        self.spec = member.spec
        self.rank = member.rank
        self.rendezvous = rendezvous
        self.scheduler = scheduler
        self.has_program = has_program
        self.attached = attached
        self.early_error = early_error
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.hellos: dict[int, dict[str, Any]] = {}
        self.channels: dict[int, MessageStream] = {}
        self.names: dict[int, set[str]] = {}
        self.wanted: set[str] = set()
        self.registered: set[str] = set()
        self.choice = Choice("tcp", "")
        self.warm: dict[str, list[LinkTest]] = {}
        self.told_warm = False
        self.on_device = False
        self.orders: MessageStream | None = None
        self.address = ""
        self.written = ""
        self.dashboard_host, self.dashboard = "", 0
        self.signalled: int | None = None
        self.deadline = time.monotonic() + self.spec.timeout
        self._tasks: set[asyncio.Task[None]] = set()

    async def lead(self) -> int:
        """Run everything and return the exit code of the run."""
        attached = self.attached is not None
        self.member.signals.handle(
            lambda number: self._happened("signal", number),
            repeated={signal.SIGINT} if attached else set(),
        )
        if self.spec.tls:
            self.member.credentials = create_credentials()
            mark("credentials made")
        else:
            say(
                "warning: --no-tls: any user who reaches a port of this run runs code as you, also "
                "from this machine"
            )
        try:
            if self.early_error:
                raise self.early_error
            await self._bring_up()
            code = await self._watch()
        except OSError as error:
            complain(f"rank 0 on {self.rank.host} cannot go on: {error}")
            code = ClusterError.exit_code
        except HpcdaskError as error:
            complain(error)
            code = error.exit_code
            if error is self.early_error:
                await self._gather_to_dismiss()
        except _Interrupted as stop:
            code = 128 + stop.number
        missing = self.rank.size - len(self.hellos)
        await self._take_down(code)
        if missing:
            self.member.abort_launch(code)
        return code

    def _happened(self, what: str, value: Any = None) -> None:
        self.events.put_nowait(Event(what, value))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._happened("broken", error)

    # Bringing up

    async def _bring_up(self) -> None:
        self.orders = await self.scheduler.channel()
        if self.spec.interface != AUTO:
            self._start_scheduler(self.spec.interface)
        views = await self._meet()
        mark("ranks met")
        places = self._plan(views)
        if self.spec.device == "auto" and not any(view.gpus for view in views.values()):
            say("no GPU here, so workers compute on the CPU (--device cpu says that this is meant)")
        self._widen_scheduler(views)
        self._start(self._listen_to_scheduler())
        started = (await self._next("the scheduler to start", {"scheduler"})).value
        mark("scheduler listens")
        if "error" in started:
            raise ClusterError(started["error"])
        self.address = started["address"]
        self.dashboard_host, self.dashboard = started["dashboard"]
        self._start_workers(places)
        least = min(self.spec.workers_min or len(self.wanted), len(self.wanted))
        while len(self.registered & self.wanted) < least:
            await self._next("workers to register", {"workers"}, self._missing_workers)
        if self.spec.scheduler_file:  # another run may have taken it meanwhile
            await asyncio.to_thread(scheduler_file.check_writable, self.spec.scheduler_file)
        self._announce(places)

    def _start_scheduler(self, interface: str | None) -> None:
        assert self.orders is not None
        # In a job login nodes shall reach it. On other hosts anybody may work.
        listens = LOOPBACK if self._host() == LOOPBACK or job_id() is None else ""
        self.orders.send(
            host=None if interface else self._host(),
            interface=interface,
            protocol="tls" if self.spec.tls else "tcp",
            credentials=self.member.credentials,
            dashboard=self.spec.dashboard_address or f"{listens}:8787",
            scratch=self.member.scratch,
        )

    def _plan(self, views: dict[int, Inventory]) -> dict[int, list[WorkerPlacement]]:
        """Who computes on what, how they exchange data, and where the scheduler listens."""
        places = place_workers(self.spec, self.rank, views, job=job_id())
        planned = sum(map(len, places.values()))
        if (self.spec.workers_min or 0) > planned:
            raise UsageError(
                f"--workers-min {self.spec.workers_min}: there will be {_workers(planned)} here. "
                f"Ask for no more"
            )
        seats = {
            index: NodeLinks(
                view.host,
                tuple(place.gpu for place in places.get(index, ()) if place.gpu),
                Fabric.from_json(self.hellos[index]["fabric"]),
            )
            for index, view in views.items()
        }
        # also of ranks without workers: the scheduler's must be one that the workers reach
        interfaces = choose_interface(self.spec, list(seats.values()))
        working = {index: seats[index] for index in places}
        self.choice = choose(self.spec, list(working.values()))
        for warning in self.choice.warnings:
            say(f"warning: {warning}")
        if any(seat.gpus for seat in working.values()) and (
            lacks := memory_plan.missing(self.spec)
        ):
            say(f"warning: {lacks}")
        places = with_transport(self.spec, places, working, self.choice, interfaces)
        if self.spec.interface == AUTO:
            self._start_scheduler(interfaces[self.rank.host])
        return places

    def _host(self) -> str:
        """Address of rank 0: loopback where nobody elsewhere needs it."""
        from distributed.utils import get_ip, get_ip_interface

        if self.spec.interface and self.spec.interface != AUTO:
            with contextlib.suppress(ValueError):  # reported by this rank's view
                return str(get_ip_interface(self.spec.interface))
        if self.rank.one_node and self.has_program and not self.spec.scheduler_file:
            return LOOPBACK
        return str(get_ip())

    async def _meet(self) -> dict[int, Inventory]:
        """Have every rank say what it sees."""
        nonce = secrets.token_hex(16)
        self.hellos[0] = await asyncio.to_thread(self.member.hello)
        if self.rendezvous is not None:
            host, context = self._host(), None
            if self.member.credentials:
                access = to_security(self.member.credentials)
                context = access.get_listen_args("scheduler")["ssl_context"]
            hub = ControlServer(nonce, self._arrived)
            port = await hub.listen(host, context)
            self.rendezvous.publish(
                {
                    "address": host,
                    "port": port,
                    "host": self.rank.host,
                    "nonce": nonce,
                    "credentials": self.member.credentials,
                }
            )
            while len(self.hellos) < self.rank.size:
                await self._next("every rank to arrive", {"arrived"}, self._missing_ranks)
            hub.close()
            self.rendezvous.close()
        for index, hello in sorted(self.hellos.items()):
            if "error" in hello:
                where = f" (rank {index} on {hello['host']})" if self.rank.size > 1 else ""
                raise UsageError(f"{hello['error']}{where}")
        views = [Inventory.from_json(hello["view"]) for hello in self.hellos.values()]
        return {view.rank: view for view in assignment.fill_from_first_rank(views)}

    async def _gather_to_dismiss(self) -> None:
        """After an early error: let the others arrive, so that they can be told to end."""
        self.deadline = time.monotonic() + min(self.spec.timeout, 10)
        with contextlib.suppress(HpcdaskError, OSError, _Interrupted):
            await self._meet()

    def _missing_ranks(self) -> LaunchError:
        missing = sorted(set(range(self.rank.size)) - set(self.hellos))
        hosts = Counter(hello["host"] for hello in self.hellos.values())
        there = ", ".join(f"{count} on {host}" for host, count in hosts.items())
        return LaunchError(
            f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.rank.size} "
            f"did not arrive within {self.spec.timeout:g} s (there are {there}). See what those "
            f"ranks printed and whether they reach {self.rank.host}, or allow more with --timeout"
        )

    async def _arrived(self, hello: dict[str, Any], channel: MessageStream) -> None:
        index = int(hello["rank"])
        self.hellos[index] = hello
        self.channels[index] = channel
        self._happened("arrived", index)
        while (message := await channel.receive()) is not None:
            match message.get("op"):
                case "signal":
                    self._happened("signal", message["number"])
                case "failed":
                    self._happened("failed", (index, message["name"], message["error"]))
                case "program-ended":
                    self._happened("program", message["code"])
        self._happened("lost", index)

    def _widen_scheduler(self, views: dict[int, Inventory]) -> None:
        """A launcher that pins ranks left the scheduler on rank 0's core: give it the node's."""
        here = [view for view in views.values() if view.host == self.rank.host]
        resources.widen(owned_cores(here), self.scheduler.pid)

    def _start_workers(self, places: dict[int, list[WorkerPlacement]]) -> None:
        self.names = {index: {place.name for place in group} for index, group in places.items()}
        self.on_device = any(place.gpu for group in places.values() for place in group)
        self.wanted = set().union(*self.names.values())
        for index, group in places.items():
            if index != 0:
                sent = [dataclasses.asdict(place) for place in group]
                self.channels[index].send(op="work", scheduler=self.address, places=sent)
        if 0 in places:
            self._start(self._own_workers(places[0]))

    async def _own_workers(self, places: list[WorkerPlacement]) -> None:
        try:
            await self.member.start_workers(
                places,
                self.address,
                lambda name, text: self._happened("failed", (0, name, text)),
            )
        except Exception as error:
            self._happened("failed", (0, None, f"{type(error).__name__}: {error}"))

    def _missing_workers(self) -> LaunchError:
        missing = ", ".join(sorted(self.wanted - self.registered))
        return LaunchError(
            f"of {len(self.wanted)} workers, these did not register within "
            f"{self.spec.timeout:g} s: {missing}. Allow more with --timeout, or start with fewer "
            f"by --workers-min"
        )

    def _announce(self, places: dict[int, list[WorkerPlacement]]) -> None:
        group = [place for part in places.values() for place in part]
        hosts = {self.hellos[index]["host"] for index in places}
        kinds = Counter(place.gpu.name if place.gpu else "CPU" for place in group)
        what = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        network = "tcp with TLS" if self.spec.tls else "tcp without TLS"
        if self.choice.protocol == "ucx":
            network = f"ucx between workers, {network} to the scheduler"
        if self.spec.protocol == "auto" and self.on_device:
            network += f" ({self.choice.reason})"
        host = own = self.address.rpartition("://")[2].rpartition(":")[0]
        if self.dashboard_host == LOOPBACK:
            host = LOOPBACK
        there, planned = len(self.registered), len(group)
        count = _workers(there) if there >= planned else f"{there} of {_workers(planned)}"
        say(
            f"{count} on {len(hosts)} node{'s' * (len(hosts) != 1)} "
            f"({what}), {network}, ready in {seconds_since_start():.2f} s; "
            f"dashboard http://{host}:{self.dashboard}/status"
        )
        file = self.spec.scheduler_file
        if file:
            path = os.path.abspath(file)
            self.member.janitor.remove_at_once(path)
            self.member.janitor.remove_at_once(f"{path}.keys")
            self.written = path
            scheduler_file.write(path, self.address, self.member.credentials, job=job_id())
        if not self.has_program:
            way = f'hpcdask.connect("{file}")' if file else f'Client("{self.address}")'
            if self.spec.tls and not file:
                way = "clients need its keys: start it with --scheduler-file"
            say(f"scheduler at {self.address}: {way}")
        if not self.has_program or host != own:
            way = (
                f"127.0.0.1:{self.dashboard} {self.rank.host}"
                if host == LOOPBACK
                else f"{self.rank.host}:{self.dashboard} <login node>"
            )
            say(
                f"dashboard from your own machine: ssh -L {self.dashboard}:{way}, then "
                f"http://localhost:{self.dashboard}/status"
            )

    def _note_warm(self, message: dict[str, Any]) -> None:
        """Once all workers have exchanged data, say how that went."""
        self.warm[message["name"]] = [LinkTest(**link) for link in message["links"]]
        if self.told_warm or not self.wanted <= set(self.warm):
            return
        self.told_warm = True
        links = [link for found in self.warm.values() for link in found]
        if not links:
            return
        found = evaluate(links, on_device=self.on_device)
        say(f"warm in {seconds_since_start():.2f} s: {found.line}")
        for warning in found.warnings:
            say(f"warning: {warning}")

    # Waiting for events

    async def _listen_to_scheduler(self) -> None:
        assert self.orders is not None
        closed = False
        while (message := await self.orders.receive()) is not None:
            if "workers" in message:
                self.registered = set(message["workers"])
                self._happened("workers")
            elif "warm" in message:
                self._note_warm(message["warm"])
            elif message.get("closed"):
                closed = True
            else:
                self._happened("scheduler", message)
        self._happened("scheduler-closed" if closed else "scheduler-lost")

    async def _next(
        self, what: str, wanted: set[str], too_late: Callable[[], LaunchError] | None = None
    ) -> Event:
        """The next event of a kind, while the cluster comes up."""
        while True:
            remaining = self.deadline - time.monotonic()
            try:
                async with asyncio.timeout(max(0.0, remaining)):
                    event = await self.events.get()
            except TimeoutError:
                waited = f"waited {self.spec.timeout:g} s for {what}; allow more with --timeout"
                raise (too_late() if too_late else LaunchError(waited)) from None
            if event.what in wanted:
                return event
            match event.what:
                case "broken":
                    raise event.value
                case "signal":
                    raise _Interrupted(event.value)
                case "lost":
                    self.channels.pop(event.value, None)
                    who = self._who(event.value)
                    raise ClusterError(
                        f"{who} ended while the cluster came up; see what it printed"
                    )
                case "failed":
                    index, name, text = event.value
                    failure = f"a worker of {self._who(index)} did not start: {text}"
                    if not self._enough_without(index, name):
                        raise ClusterError(failure)
                    say(failure)
                case "scheduler-lost":
                    raise ClusterError("the scheduler's process ended while the cluster came up")

    def _who(self, index: int) -> str:
        return f"rank {index} on {self.hellos[index]['host']}"

    # The run

    async def _watch(self) -> int:
        """From ready to the end of the program, or of the cluster."""
        self._start_program()
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
                    return 128 + (self.signalled or signal.SIGTERM)
                case "signal" if not self.has_program:
                    return 128 + int(event.value)
                case "signal" if self.attached is not None and event.value == signal.SIGINT:
                    pass  # meant for the program, which gets it itself, and may go on
                case "signal" if self.signalled is None:
                    self._end_program_by(event.value)
                case "lost" if self._goes_on_without(event.value):
                    pass
                case "failed" if self._enough_without(*event.value[:2]):
                    index, _, text = event.value
                    say(f"a worker of {self._who(index)} did not start: {text}")
                case "lost" | "scheduler-lost" | "failed" if not lost:
                    complain(self._loss(event))
                    if not self.has_program:
                        return ClusterError.exit_code
                    lost = True
                    self._signal_program(signal.SIGTERM)
                    self._later(LOSS_DEADLINE_S, "gave-up")
                case "scheduler-closed" if not self.has_program:
                    return 0
                case "scheduler-closed":
                    self.wanted = set()  # the program has shut the cluster down
                case "workers" if not self.registered:
                    self._later(NO_WORKER_NOTICE_S, "still-no-workers")
                case "still-no-workers" if self.wanted and not self.registered:
                    say("no worker is left: Dask tasks wait until one comes back")

    def _later(self, seconds: float, what: str) -> None:
        asyncio.get_running_loop().call_later(seconds, self._happened, what)

    def _goes_on_without(self, index: int) -> bool:
        """Forget a rank that is gone; say whether enough workers remain."""
        self.channels.pop(index, None)
        program_rank = 1 if self.spec.layout == "dedicated" else 0
        if index == program_rank or not self._enough_without(index):
            return False
        least = self.spec.workers_min
        say(
            f"{self._who(index)} is gone; the run goes on with {_workers(len(self.wanted))} "
            f"(--workers-min {least})"
        )
        return True

    def _enough_without(self, index: int, name: str | None = None) -> bool:
        """Whether --workers-min is still met without a worker of a rank; without all by default."""
        self.wanted -= {name} if name else self.names.get(index, set())
        least = self.spec.workers_min
        return least is not None and len(self.wanted) >= least

    def _loss(self, event: Event) -> ClusterError:
        if event.what == "scheduler-lost":
            return ClusterError(
                "the scheduler's process was killed: see whether the node ran out of memory. "
                "The run ends"
            )
        if event.what == "failed":
            index, _, text = event.value
            why = text.rstrip(".")
            return ClusterError(f"a worker of {self._who(index)} failed: {why}. The run ends")
        return ClusterError(
            f"{self._who(event.value)} is gone: it was killed or its node failed. The run ends "
            f"(--workers-min lets it go on)"
        )

    def _start_program(self) -> None:
        if self.attached is not None:
            self._start(self._attend(self.attached))
        elif self.member.program is not None:
            self.member.start_program(self.address)
            self._start(self._await_program(self.member.program))
        elif self.has_program:
            self.channels[1].send(op="program", address=self.address)

    async def _await_program(self, program: ForkedProcess) -> None:
        self._happened("program", await program.wait())

    async def _attend(self, line: ForkedProcess) -> None:
        """Tell the program that started this rank where the cluster is, and wait for its end."""
        channel = await line.channel()
        file = os.path.join(self.member.scratch, "scheduler.json")
        scheduler_file.write(file, self.address, self.member.credentials, job=job_id())
        channel.send(address=self.address, file=file)
        while await channel.receive() is not None:
            pass
        self._happened("program", 0)

    def _end_program_by(self, number: int) -> None:
        self.signalled = number
        self._signal_program(number)
        if number != signal.SIGINT:
            name = signal.Signals(number).name
            say(f"{name}: the run ends, and the program has {TERM_DEADLINE_S:g} s to end before it")
            self._later(TERM_DEADLINE_S, "deadline")

    def _signal_program(self, number: int) -> None:
        if self.member.program is not None:
            self.member.pass_on(number)
        elif self.spec.layout == "dedicated" and 1 in self.channels:
            self.channels[1].send(op="signal", number=int(number))

    # Taking down

    async def _take_down(self, code: int) -> None:
        """End the workers and the other ranks, then the scheduler; this rank is the last."""
        self.member.end_program()
        if self.orders is not None:
            self.orders.send(op="quiet")
        never_ran = code == UsageError.exit_code and not self.registered
        for channel in self.channels.values():
            channel.send(op="end", code=code if never_ran else 0)
        await asyncio.gather(self.member.close_workers(), self._others_gone())
        if self.orders is not None:
            self.orders.send(op="close")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self.scheduler.wait()
        self.scheduler.send_signal(signal.SIGKILL)
        if self.rendezvous is not None:
            self.rendezvous.close()
        if self.written:
            scheduler_file.remove(self.written, self.address)
            self.member.janitor.forget(self.written)  # the next cluster may write there now
            self.member.janitor.forget(f"{self.written}.keys")

    async def _others_gone(self) -> None:
        """Wait until every other rank has left: a launcher reports the ranks that still live."""
        left: set[int] = set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_DEADLINE_S):
                while set(self.channels) - left:
                    event = await self.events.get()
                    if event.what == "lost":
                        left.add(event.value)
        # Their sockets close a moment before the launcher reaps them, and it reports those
        # that it still has when this rank fails. /proc has no event for that.
        mates = [
            hello["pid"]
            for index, hello in self.hellos.items()
            if index != 0 and hello["host"] == self.rank.host
        ]
        deadline = time.monotonic() + 0.5
        while any(map(_exists, mates)) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count != 1)}"


def _exists(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")
