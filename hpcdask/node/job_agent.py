"""Workers of one job on one node: from the first connection to the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import traceback
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from distributed.comm import connect
from distributed.core import rpc

from hpcdask.bootstrap.orders import Message, MessageStream, Signal
from hpcdask.bootstrap.ranks import Rank
from hpcdask.comm.transport import NodeLinks, choose_alone, choose_interface
from hpcdask.errors import ClusterError, DeviceError, HpcdaskError, root_cause
from hpcdask.gpu import locks
from hpcdask.gpu.devices import Gpu
from hpcdask.logs import complain, plural, say
from hpcdask.queues import environment
from hpcdask.queues.environment import job_id
from hpcdask.security.credentials import load_credentials, to_security
from hpcdask.spec.job import JobSpec
from hpcdask.upstream.distributed import (
    CONNECTION_BROKEN,
    HEARTBEAT_ERROR,
    SCHEDULER_CLOSED,
    run_in_loop,
)

from .host_agent import HURRIED_S, HostAgent
from .placement import Inventory, WorkerPlacement, split_node, with_transport
from .preflight import tell_warnings

if TYPE_CHECKING:
    from distributed.comm import Comm

T = TypeVar("T")
#: Seconds to hand over what the workers hold; queueing systems often kill 30 s after SIGTERM.
HAND_OVER_DEADLINE_S = 20.0
#: Seconds between two attempts, while nobody could take it.
HAND_OVER_PAUSE_S = 1.0
#: Seconds to tell the scheduler what could not be handed over.
LEAVE_BEHIND_DEADLINE_S = 2.0
#: Seconds that workers get to hear what one of them has heard.
SETTLE_S = 1.0
#: Seconds that a scheduler which takes a connection has to say who it is, beside those to connect.
HANDSHAKE_DEADLINE_S = 3.0
#: Seconds in which the scheduler has to say which workers it has.
ANSWER_DEADLINE_S = 5.0
FOREVER_S = 1e8
#: Why a worker closes when nobody asked it to.
ABNORMAL = (None, CONNECTION_BROKEN, HEARTBEAT_ERROR)


class _Signalled(Exception):
    """A signal ends the job."""


class _Closed(Exception):
    """The scheduler has closed in good order."""


def run_agent(line: socket.socket, asked: JobSpec, rank: Rank) -> NoReturn:
    """Be the agent of a job on one node."""
    run_in_loop(_run(line, asked, rank))
    raise AssertionError("it leaves by itself")


async def _run(line: socket.socket, asked: JobSpec, rank: Rank) -> NoReturn:
    line.setblocking(False)
    workers = HostAgent(await MessageStream.over(line), asked.spec, rank, tells=True)
    try:
        workers.prepare()
        job = JobAgent(asked, workers)
        listening = asyncio.create_task(workers.listen(job.hear))
        code = await job.run()
        listening.cancel()
    except HpcdaskError as error:
        complain(f"job {asked.job} on {rank.host}: {error}")
        code = error.exit_code
    except Exception:
        traceback.print_exc()
        code = 1
    await workers.close_workers(HURRIED_S)
    workers.leave(code)


class JobAgent:
    """What a job does on one node of its own."""

    def __init__(self, asked: JobSpec, workers: HostAgent) -> None:
        self.asked, self.spec, self.rank = asked, asked.spec, workers.rank
        self.workers = workers
        self.access = to_security(load_credentials(asked.keys) if asked.keys else {})
        self.connection_args: dict[str, Any] = self.access.get_connection_args("worker")
        self.line: Comm | None = None  # None too while the scheduler does not answer
        self.signalled: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def hear(self, message: Message) -> None:
        """Note a signal."""
        if isinstance(message, Signal) and not self.signalled.done():
            self.signalled.set_result(message.number)

    async def run(self) -> int:
        """Bring the workers up, watch over them, and return the exit code."""
        try:
            placements = await self._alive(asyncio.to_thread(self._place))
            self.line = await self._alive(self._connect(self.spec.death_timeout))
            self.gone = asyncio.ensure_future(self._scheduler_gone())
            await self._alive(self._start(placements))
            return await self._watch()
        except _Signalled:
            return await self._end_by_signal()
        except _Closed:
            return 0

    async def _alive(self, work: Coroutine[Any, Any, T]) -> T:
        """Do what brings the workers up, unless a signal comes or the scheduler goes."""
        task = asyncio.ensure_future(work)
        first: list[asyncio.Future[Any]] = [task, self.signalled, self.gone]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if self.signalled.done():
            task.cancel()
            raise _Signalled
        if self.gone.done():
            # A nanny that fails to start for it closes by itself, which must not be cut off
            task.add_done_callback(lambda _: task.cancelled() or task.exception())
            raise self._loss()
        return task.result()

    # Bringing up

    async def _start(self, placements: list[WorkerPlacement]) -> None:
        try:
            await self.workers.start_workers(placements, self.asked.scheduler, self.access)
        except Exception as error:
            await self._check_scheduler()
            raise ClusterError(
                f"a worker did not start: {root_cause(error).rstrip('.')}. See its lines above, "
                f"and hpcdask doctor on this node"
            ) from error

    def _place(self) -> list[WorkerPlacement]:
        found, fabric = self.workers.look()
        given = self._devices(found)
        gpus = tuple(gpu for gpu in given if gpu)
        what = plural(len(found.cores), "core")
        if gpus:
            names, uuids = dict.fromkeys(gpu.name for gpu in gpus), (gpu.uuid for gpu in gpus)
            what = f"{plural(len(gpus), 'GPU')} ({', '.join(names)} {', '.join(uuids)})"
        links = NodeLinks(found.host, gpus, fabric)
        choice = choose_alone(self.spec, links)
        why = f" ({choice.reason})" if self.spec.protocol == "auto" and gpus else ""
        say(
            f"job {self.asked.job} on {found.host}: {plural(len(given), 'worker')} on {what}, "
            f"{choice.protocol}{why}"
        )
        tell_warnings(self.spec, choice, on_device=bool(gpus))
        names_here = self.asked.names(self.rank.index)
        placements = split_node(self.spec, given, names_here, [found], len(given))
        interfaces = choose_interface(self.spec, [links])
        return with_transport(self.spec, {0: placements}, {0: links}, choice, interfaces)[0]

    def _devices(self, found: Inventory) -> list[Gpu | None]:
        """A device for each worker: as many distinct GPUs, or the CPU."""
        wanted, job = self.asked.workers, job_id()
        if self.spec.device == "cpu":
            return [None] * wanted
        if not found.gpus and self.spec.device == "auto" and job is None:
            say("no GPU here, so workers compute on the CPU (--device cpu says that this is meant)")
            return [None] * wanted
        if len(found.gpus) < wanted:
            seen = f"only {plural(len(found.gpus), 'GPU')}" if found.gpus else "no GPU"
            raise DeviceError(
                f"{plural(wanted, 'worker')} and {seen} here. {environment.how_to_request(job)}"
                f"A cluster of jobs requests them with gpus_per_job or gpu_request. To compute on "
                f'the CPU: device="cpu", or --device cpu'
            )
        if locks.shared_on_purpose():
            return list(found.gpus[:wanted])
        taken = locks.lock_gpus(found.gpus, wanted, f"job {self.asked.job}, process {os.getpid()}")
        if len(found.gpus) > wanted:
            say(
                f"{len(found.gpus)} GPUs are visible to job {self.asked.job}, which needs "
                f"{wanted}: took {', '.join(gpu.uuid for gpu in taken)}, which no other job of "
                f"yours here holds"
            )
        return list(taken)

    async def _connect(self, timeout: float | None) -> Comm:
        """A connection whose end tells that the scheduler is gone."""
        address = self.asked.scheduler
        # connect's own deadline leaves out the handshake, and tells why it was missed
        deadline = timeout + HANDSHAKE_DEADLINE_S if timeout else None
        advice = "See whether the cluster still runs, and whether this node reaches that address"
        try:
            async with asyncio.timeout(deadline):
                line: Comm = await connect(
                    address, timeout=timeout or FOREVER_S, **self.connection_args
                )
                return line
        except OSError as error:
            waited = f" within {timeout:g} s" if timeout else ""
            raise ClusterError(
                f"no answer from the scheduler at {address}{waited}: {root_cause(error)}. {advice}"
            ) from error
        except Exception as error:  # what another program sends may be any
            raise ClusterError(
                f"what answers at {address} does not speak as a scheduler of Dask: "
                f"{root_cause(error)}. {advice}"
            ) from error

    # The life of the workers

    async def _watch(self) -> int:
        """Wait for the end of a worker, of the scheduler, or for a signal."""
        nannies = self.workers.nannies
        overs = {asyncio.ensure_future(nanny.wait_closed()): nanny for nanny in nannies}
        first: list[asyncio.Future[Any]] = [self.signalled, self.gone, *overs]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if self.signalled.done():
            raise _Signalled
        await asyncio.wait(overs, timeout=SETTLE_S)
        reasons = {nanny.name: over.result() for over, nanny in overs.items() if over.done()}
        bad = [name for name, reason in reasons.items() if reason in ABNORMAL]
        if SCHEDULER_CLOSED in reasons.values():
            return 0
        await self._check_scheduler()
        if (len(overs) > 1 or self.rank.size > 1) and (others := await self._hand_over()):
            say(
                f"worker {' and '.join(reasons)} ended, so job {self.asked.job} ends as a whole, "
                f"with {' and '.join(sorted(others))}"
            )
        if bad:
            why = "lost the scheduler" if reasons[bad[0]] else "is not there any more"
            raise ClusterError(f"worker {bad[0]} {why}; see above")
        return 0

    async def _check_scheduler(self) -> None:
        """Raise if the scheduler is gone."""
        await asyncio.sleep(0.1)  # its connections break at once, and are noticed one by one
        if self.gone.done():
            raise self._loss()

    def _loss(self) -> Exception:
        if any(nanny.reason == SCHEDULER_CLOSED for nanny in self.workers.nannies):
            return _Closed()
        return ClusterError(
            f"the scheduler at {self.asked.scheduler} is gone, so the workers end. See what the "
            f"cluster's own process printed"
        )

    async def _scheduler_gone(self) -> None:
        """Wait until the scheduler's side of the connection ends."""
        assert self.line is not None
        with contextlib.suppress(OSError):
            await self.line.read()
        self.line = None

    async def _end_by_signal(self) -> int:
        number = self.signalled.result()
        name = signal.Signals(number).name
        if self.line is None:
            say(f"{name}: job {self.asked.job} ends")
        else:
            say(f"{name}: job {self.asked.job} hands over what its workers hold, and ends")
            await self._hand_over()
        return 128 + number

    async def _hand_over(self) -> set[str]:
        """Ask the scheduler to move elsewhere what the job's workers hold, on all its nodes.

        Returns the workers that were there.
        """
        names = set(self.asked.names(0, self.rank.size))
        there: set[str] = set()
        try:
            async with rpc(self.asked.scheduler, connection_args=self.connection_args) as scheduler:
                try:
                    async with asyncio.timeout(ANSWER_DEADLINE_S):
                        there = names & set(await _addresses(scheduler))
                except TimeoutError:
                    silent = f"no answer within {ANSWER_DEADLINE_S:g} s"
                    raise ClusterError(silent) from None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HAND_OVER_DEADLINE_S):
                        await _retire(scheduler, names)
                async with asyncio.timeout(LEAVE_BEHIND_DEADLINE_S):
                    await _leave_behind(scheduler, names)
        except Exception as error:  # whatever the scheduler answers, this job ends
            say(f"the scheduler does not take over what the workers hold: {root_cause(error)}")
        return there


async def _retire(scheduler: Any, names: set[str]) -> None:
    """Retire workers, as often as it takes: a replacement may come that takes what they hold."""
    while left := names & set(await _addresses(scheduler)):
        done = await scheduler.retire_workers(names=sorted(left), close_workers=True)
        if len(done) < len(left):
            await asyncio.sleep(HAND_OVER_PAUSE_S)


async def _leave_behind(scheduler: Any, names: set[str]) -> None:
    """Take those that are left out of the scheduler's books, as an end that was expected."""
    for name, address in (await _addresses(scheduler)).items():
        if name in names:
            say(f"nobody took in time what {name} holds: Dask computes it again")
            await scheduler.unregister(
                address=address, expected=True, stimulus_id=f"job-ends-{name}"
            )


async def _addresses(scheduler: Any) -> dict[str, str]:
    """Name to address of the scheduler's workers."""
    workers = (await scheduler.identity())["workers"]
    return {str(worker["name"]): address for address, worker in workers.items()}
