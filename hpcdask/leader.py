"""Rank 0: brings the cluster up, watches over the run, takes everything down.

What happens anywhere arrives as an `Event` in one queue and is decided in one place.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import shutil
import signal
import time
from collections import Counter
from typing import Any, NamedTuple

from . import devices, schedulerfile, security
from .children import Child
from .control import Channel, Hub
from .devices import View
from .errors import ClusterError, HpcdaskError, LaunchError, UsageError
from .member import TERM_DEADLINE_S, Member, complain, say, seconds_since_start
from .ranks import job_id
from .rendezvous import Rendezvous
from .worker import Place


class Event(NamedTuple):
    """Something that happened: what, and the rank, number or code that belongs to it."""

    what: str
    value: Any = None


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
    attached
        A socket whose end says that the program, which started this rank, is over; or None.
    has_program
        Whether some rank runs a program.
    early_error
        Bad input that was found already: the others are told, then all end.
    """

    def __init__(self, member: Member, rendezvous: Rendezvous | None, scheduler: Child, *,
                 has_program: bool, attached: Child | None = None,
                 early_error: HpcdaskError | None = None) -> None:
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
        self.channels: dict[int, Channel] = {}
        self.worker_ranks: set[int] = set()
        self.named: set[str] = set()
        self.orders: Channel | None = None
        self.program_runs = False
        self.signalled: int | None = None
        self.deadline = time.monotonic() + self.spec.timeout

    async def lead(self) -> int:
        """Run everything and return the exit code of the run."""
        loop = asyncio.get_running_loop()
        self.member.handle_signals(lambda number: self.events.put_nowait(Event("signal", number)))
        code = 1
        try:
            if self.early_error:
                raise self.early_error
            await self._bring_up()
            code = await self._watch()
        except HpcdaskError as error:
            complain(error)
            code = error.exit_code
            if self.early_error:
                with contextlib.suppress(HpcdaskError):
                    self.deadline = loop.time() + min(self.spec.timeout, 10)
                    await self._meet()
        except _Interrupted as stop:
            code = 128 + stop.number
        return await self._take_down(code)

    # Bringing up

    async def _bring_up(self) -> None:
        if self.spec.tls:
            self.member.credentials = security.create_credentials()
        host = self._host()
        self.orders = await self.scheduler.channel()
        self.orders.send(
            host=None if self.spec.interface else host, interface=self.spec.interface,
            protocol="tls" if self.spec.tls else "tcp", credentials=self.member.credentials,
            dashboard=self.spec.dashboard_address)
        views = await self._meet()
        places = self._places(views)
        started = await self._expect("scheduler", "the scheduler to start")
        if "error" in started:
            raise ClusterError(started["error"])
        self.address, self.dashboard = started["address"], started["dashboard"]
        self.wanted = {place.name for group in places.values() for place in group}
        for index, group in places.items():
            if index != 0:
                self.channels[index].send(
                    op="work", scheduler=self.address,
                    places=[dataclasses.asdict(place) for place in group])
        if places.get(0):
            asyncio.create_task(self._own_workers(places[0]))
        await self._expect("workers", "workers to register")
        self._announce(places)

    def _host(self) -> str:
        """Address of rank 0: loopback where nobody elsewhere needs it."""
        if self.spec.interface:
            from distributed.utils import get_ip_interface

            try:
                return str(get_ip_interface(self.spec.interface))
            except ValueError:
                return "127.0.0.1"  # the view of this rank reports it
        if self.rank.one_node and self.has_program and not self.spec.scheduler_file:
            return "127.0.0.1"
        from distributed.utils import get_ip

        return str(get_ip())

    async def _meet(self) -> dict[int, View]:
        """Have every rank say what it sees."""
        nonce = secrets.token_hex(16)
        own = self.member.hello(nonce)
        self.hellos[0] = own
        if self.rendezvous is not None:
            host = self._host()
            context = None
            if self.member.credentials:
                context = security.to_security(self.member.credentials).get_listen_args(
                    "scheduler")["ssl_context"]
            hub = Hub(nonce, self._arrived)
            port = await hub.listen(host, context)
            self.rendezvous.publish({"address": host, "port": port, "host": self.rank.host,
                                     "nonce": nonce, "credentials": self.member.credentials})
            while len(self.hellos) < self.rank.size:
                await self._next("every rank to arrive", {"arrived"}, self._missing_ranks)
            hub.close()
            self.rendezvous.close()
        for index, hello in sorted(self.hellos.items()):
            if "error" in hello:
                where = f" (rank {index} on {hello['host']})" if self.rank.size > 1 else ""
                raise UsageError(f"{hello['error']}{where}")
        return {index: View.from_json(hello["view"]) for index, hello in self.hellos.items()}

    def _missing_ranks(self) -> LaunchError:
        missing = sorted(set(range(self.rank.size)) - set(self.hellos))
        hosts = Counter(hello["host"] for hello in self.hellos.values())
        there = ", ".join(f"{count} on {host}" for host, count in hosts.items())
        return LaunchError(
            f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.rank.size} did not "
            f"arrive within {self.spec.timeout:g} s (there are {there}). See what those ranks printed, "
            f"whether they reach {self.rank.host}, or allow more with --timeout")

    async def _arrived(self, hello: dict[str, Any], channel: Channel) -> None:
        index = int(hello["rank"])
        self.hellos[index] = hello
        self.channels[index] = channel
        self.events.put_nowait(Event("arrived", index))
        while (message := await channel.receive()) is not None:
            match message.get("op"):
                case "signal":
                    self.events.put_nowait(Event("signal", message["number"]))
                case "failed":
                    self.events.put_nowait(Event("failed", (index, message["error"])))
                case "program-ended":
                    self.events.put_nowait(Event("program", message["code"]))
        self.events.put_nowait(Event("lost", index))

    def _places(self, views: dict[int, View]) -> dict[int, list[Place]]:
        """Decide which worker runs where."""
        first = 2 if self.spec.layout == "dedicated" else 0
        working = [view for index, view in sorted(views.items()) if index >= first]
        given = devices.assign(
            working, device=self.spec.device, oversubscribe=self.spec.oversubscribe, job=job_id(),
            every_gpu=self.rank.launcher == "none")
        if not working[0].gpus and self.spec.device == "auto":
            say("no GPU here, so workers compute on the CPU (--device cpu says that this is meant)")
        processes, threads = 1, 0
        if self.rank.launcher == "none" and given[first] == [None]:
            from distributed.deploy.utils import nprocesses_nthreads

            processes, threads = nprocesses_nthreads()
            given[first] = [None] * processes
        places: dict[int, list[Place]] = {}
        self.worker_ranks = set(given)
        for view in working:
            mates = [other for other in working if other.host == view.host]
            owned = sorted({core for other in mates for core in other.cores})
            count = sum(len(given[other.rank]) for other in mates)
            share = int(min(other.memory for other in mates) / count)
            places[view.rank] = [
                Place(
                    name=f"{self.spec.name or view.host}-{number}",
                    gpu=gpu,
                    cores=tuple(devices.worker_cores(owned, gpu)),
                    nthreads=self.spec.nthreads or threads or (
                        1 if gpu else max(1, len(owned) // count)),
                    memory_limit=share if self.spec.memory_limit is None else self.spec.memory_limit,
                    protocol="ucx" if self.spec.protocol == "ucx" else "tcp",
                )
                for number, gpu in enumerate(given[view.rank], start=view.rank)
            ]
        if self.rank.local_size > 1:
            for view in working:
                if view.host == self.rank.host:
                    devices.widen(sorted({core for other in working if other.host == view.host
                                          for core in other.cores}), self.scheduler.pid)
                    break
        return places

    async def _own_workers(self, places: list[Place]) -> None:
        try:
            await self.member.start_workers(places, self.address)
        except Exception as error:
            self.events.put_nowait(Event("failed", (0, f"{type(error).__name__}: {error}")))

    def _announce(self, places: dict[int, list[Place]]) -> None:
        group = [place for part in places.values() for place in part]
        hosts = {self.hellos[index]["host"] for index in places}
        kinds = Counter(place.gpu.name if place.gpu else "CPU" for place in group)
        what = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        plain = "tcp with TLS" if self.spec.tls else "tcp without TLS"
        network = f"ucx, {plain} to the scheduler" if self.spec.protocol == "ucx" else plain
        say(f"{len(self.named)} worker{'s' * (len(self.named) != 1)} on {len(hosts)} "
            f"node{'s' * (len(hosts) != 1)} ({what}), {network}, ready in {seconds_since_start():.2f} s; "
            f"dashboard {self._dashboard_url()}")
        if self.spec.scheduler_file:
            path = os.path.abspath(self.spec.scheduler_file)
            for left in (path, f"{path}.keys"):
                self.member.janitor.remove_at_end(left)
            schedulerfile.write(path, self.address, self.member.credentials, job=job_id())
        if not self.has_program:
            file = f'hpcdask.connect("{self.spec.scheduler_file}")' if self.spec.scheduler_file else (
                f'Client("{self.address}"){" needs the keys: give --scheduler-file" * self.spec.tls}')
            say(f"scheduler at {self.address}: {file}")
            say(f"dashboard from your own machine: ssh -L {self.dashboard}:{self.rank.host}:"
                f"{self.dashboard} <login node>, then http://localhost:{self.dashboard}/status")

    def _dashboard_url(self) -> str:
        host = self.address.rpartition("://")[2].rpartition(":")[0]
        return f"http://{host}:{self.dashboard}/status"

    # Waiting for events

    async def _listen_to_scheduler(self) -> None:
        assert self.orders is not None
        closed = False
        while (message := await self.orders.receive()) is not None:
            if "workers" in message:
                self.named = set(message["workers"])
                self.events.put_nowait(Event("workers"))
            elif message.get("closed"):
                closed = True
            else:
                self.events.put_nowait(Event("scheduler", message))
        self.events.put_nowait(Event("scheduler-closed" if closed else "scheduler-lost"))

    async def _next(self, what: str, wanted: set[str], too_late: Any = None) -> Event:
        """The next event of a kind, while the cluster comes up."""
        while True:
            remaining = self.deadline - time.monotonic()
            try:
                async with asyncio.timeout(max(0.0, remaining)):
                    event = await self.events.get()
            except TimeoutError:
                raise (too_late() if too_late else LaunchError(
                    f"waited {self.spec.timeout:g} s for {what}; allow more with --timeout")) from None
            if event.what in wanted:
                return event
            match event.what:
                case "signal":
                    raise _Interrupted(event.value)
                case "lost":
                    raise ClusterError(f"{self._who(event.value)} ended while the cluster came up; "
                                       f"see what it printed")
                case "failed":
                    index, text = event.value
                    raise ClusterError(f"a worker of {self._who(index)} did not start: {text}")
                case "scheduler-lost":
                    raise ClusterError("the scheduler's process ended while the cluster came up")

    async def _expect(self, kind: str, what: str) -> dict[str, Any]:
        if kind == "scheduler":
            asyncio.create_task(self._listen_to_scheduler())
            return dict((await self._next(what, {"scheduler"})).value)
        least = min(self.spec.workers_min or len(self.wanted), len(self.wanted))
        while len(self.named & self.wanted) < least:
            await self._next(what, {"workers"}, self._missing_workers)
        return {}

    def _missing_workers(self) -> LaunchError:
        missing = ", ".join(sorted(self.wanted - self.named))
        return LaunchError(f"of {len(self.wanted)} workers, these did not register within "
                           f"{self.spec.timeout:g} s: {missing}. Allow more with --timeout, or start with "
                           f"fewer by --workers-min")

    def _who(self, index: int) -> str:
        return f"rank {index} on {self.hellos[index]['host']}"

    # The run

    async def _watch(self) -> int:
        """From ready to the end of the program, or of the cluster."""
        self._start_program()
        code: int | None = None
        while True:
            event = await self.events.get()
            match event.what:
                case "program":
                    return int(event.value) if code is None else code
                case "signal":
                    if not self.has_program:
                        return 128 + int(event.value)
                    if self.signalled is None:
                        self._end_program_by(event.value)
                case "deadline":
                    return 128 + (self.signalled or signal.SIGTERM)
                case "gave-up":
                    return code or 1
                case "lost" if self._goes_on_without(event.value):
                    continue
                case "lost" | "scheduler-lost" | "failed" if code is None:
                    complain(self._loss(event))
                    code = ClusterError.exit_code
                    if not self.has_program:
                        return code
                    self._signal_program(signal.SIGTERM)
                    asyncio.get_running_loop().call_later(
                        2.0, self.events.put_nowait, Event("gave-up"))
                case "scheduler-closed" if not self.has_program:
                    return 0

    def _goes_on_without(self, index: int) -> bool:
        self.channels.pop(index, None)
        self.worker_ranks.discard(index)
        if self.spec.workers_min is None or len(self.worker_ranks) < self.spec.workers_min or (
                self.spec.layout == "dedicated" and index == 1):
            return False
        say(f"{self._who(index)} is gone; the run goes on with {len(self.worker_ranks)} workers "
            f"(--workers-min {self.spec.workers_min})")
        return True

    def _loss(self, event: Event) -> ClusterError:
        if event.what == "scheduler-lost":
            return ClusterError("the scheduler's process was killed: see whether the node ran out of "
                                "memory. The run ends")
        if event.what == "failed":
            return ClusterError(f"a worker of {self._who(event.value[0])} failed: {event.value[1]}")
        return ClusterError(f"{self._who(event.value)} is gone: it was killed or its node failed. The run "
                            f"ends (--workers-min lets it go on)")

    def _start_program(self) -> None:
        self.program_runs = self.has_program
        if self.attached is not None:
            asyncio.create_task(self._attend())
        elif self.member.program is not None:
            self.member.start_program(self.address)
            asyncio.create_task(self._await_program())
        elif self.has_program:
            self.channels[1].send(op="program", address=self.address)

    async def _await_program(self) -> None:
        assert self.member.program is not None
        self.events.put_nowait(Event("program", await self.member.program.wait()))
        self.program_runs = False

    async def _attend(self) -> None:
        """Tell the program that started this rank where the cluster is, and wait for its end."""
        assert self.attached is not None
        channel = await self.attached.channel()
        file = os.path.join(self.member.scratch, "scheduler.json")
        schedulerfile.write(file, self.address, self.member.credentials, job=job_id())
        channel.send(address=self.address, file=file)
        while await channel.receive() is not None:
            pass
        self.events.put_nowait(Event("program", 0))

    def _end_program_by(self, number: int) -> None:
        self.signalled = number
        self._signal_program(number)
        if number != signal.SIGINT:
            asyncio.get_running_loop().call_later(
                TERM_DEADLINE_S, self.events.put_nowait, Event("deadline"))

    def _signal_program(self, number: int) -> None:
        if self.member.program is not None:
            self.member.pass_on(number)
        elif 1 in self.channels and self.spec.layout == "dedicated":
            self.channels[1].send(op="signal", number=int(number))

    # Taking down

    async def _take_down(self, code: int) -> int:
        """End the workers, then the scheduler, then the other ranks; this rank is the last."""
        failed_early = code != 0 and self.orders is None
        if self.member.program is not None and (self.program_runs or not self.address_known()):
            self.member.program.send_signal(signal.SIGKILL)
        if self.orders is not None:
            self.orders.send(op="quiet")
        told = code if code == UsageError.exit_code and not self.named else 0
        for channel in self.channels.values():
            channel.send(op="end", code=told)
        await asyncio.gather(self.member.close_workers(), self._others_gone())
        if self.orders is not None and not failed_early:
            self.orders.send(op="close")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self.scheduler.wait()
        self.scheduler.send_signal(signal.SIGKILL)
        if self.rendezvous is not None:
            self.rendezvous.close()
        if self.spec.scheduler_file and self.named:
            path = os.path.abspath(self.spec.scheduler_file)
            with contextlib.suppress(OSError):
                os.unlink(path)
            shutil.rmtree(f"{path}.keys", ignore_errors=True)
        return code

    def address_known(self) -> bool:
        """Whether the cluster came up far enough for a program to start."""
        return hasattr(self, "address")

    async def _others_gone(self) -> None:
        """Wait until every other rank has left: a launcher reports the ranks that still live."""
        def here() -> list[int]:
            return [index for index in self.channels if index not in gone]

        gone: set[int] = set()
        deadline = time.monotonic() + 3.0
        while here() and (remaining := deadline - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(remaining):
                    event = await self.events.get()
            except TimeoutError:
                break
            if event.what == "lost":
                gone.add(event.value)
        same_host = [hello["pid"] for index, hello in self.hellos.items()
                     if index != 0 and hello["host"] == self.rank.host]
        deadline = time.monotonic() + 0.5
        while any(os.path.exists(f"/proc/{pid}") for pid in same_host) and (
                time.monotonic() < deadline):
            await asyncio.sleep(0.005)


class _Interrupted(Exception):
    """A signal came while the cluster was coming up."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
