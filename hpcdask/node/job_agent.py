"""Workers of one job on one node: from the first connection to the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from distributed.comm import Comm, connect
from distributed.core import rpc

from hpcdask.bootstrap.orders import Message, Signal
from hpcdask.comm.transport import NodeLinks, choose, choose_interface
from hpcdask.errors import ClusterError, DeviceError, HpcdaskError, UsageError, root_cause
from hpcdask.gpu import locks
from hpcdask.gpu.devices import Gpu
from hpcdask.logs import complain, plural, say
from hpcdask.queues.registry import (
    how_to_request,
    job_id,
    queue_class,
    system_of_job,
)
from hpcdask.security.credentials import load_credentials, to_security
from hpcdask.spec.specs import JobSpec
from hpcdask.upstream import distributed as upstream

from .host_agent import HURRIED_S, HostAgent
from .placement import NO_GPU_HERE, Inventory, WorkerPlacement, place_workers, slow_parts

#: Seconds to hand over what the workers hold; queueing systems often kill 30 s after SIGTERM.
HAND_OVER_DEADLINE_S = 20.0
#: Seconds until it is seen whether nobody could take it.
HAND_OVER_PAUSE_S = 0.5
#: Seconds in which all that the end of one worker, or of the scheduler, brings with it is noticed.
SETTLE_S = 1.0
#: Seconds that a scheduler which takes a connection has to say who it is, beside those to connect.
HANDSHAKE_DEADLINE_S = 3.0
#: Seconds in which the scheduler has to say which workers it has, before and after.
ANSWER_DEADLINE_S = 4.0
FOREVER_S = 1e8
#: Why a worker closes when nobody asked it to.
ABNORMAL = (None, upstream.CONNECTION_BROKEN, upstream.HEARTBEAT_ERROR)


async def work(agent: HostAgent, asked: JobSpec) -> int:
    """Be the agent of a job on one of its nodes: bring the workers up, and return the exit code."""
    try:
        refuse_nodes(asked.job)
        agent.prepare()
        return await JobAgent(asked, agent).run()
    except HpcdaskError as error:
        complain(f"job {asked.job} on {agent.host}: {error}")
        return error.exit_code
    finally:
        await agent.close_workers(HURRIED_S)


def refuse_nodes(job: str) -> None:
    """Raise UsageError in a job of several nodes on whose others nothing starts workers."""
    system = system_of_job()
    # the variables may be those of an outer job
    numbers = {re.split(r"\D", text, maxsplit=1)[0] for text in (job, job_id() or "none")}
    if system is None or len(numbers) > 1:
        return
    if (nodes := queue_class(system).node_count(os.environ)) > 1:
        raise UsageError(
            f"it has {nodes} nodes, and only under SLURM can its workers be started on all of "
            f"them: request one node per job"
        )


class JobAgent:
    """Agent of a job on one of its nodes."""

    def __init__(self, asked: JobSpec, workers: HostAgent) -> None:
        self.asked, self.spec, self.rank = asked, workers.spec, workers.rank
        self.workers = workers
        self.access = to_security(load_credentials(asked.keys) if asked.keys else {})
        self.connection_args: dict[str, Any] = self.access.get_connection_args("worker")
        self.signalled: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.gone: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        workers.listen(self.hear)

    def hear(self, message: Message) -> None:
        if isinstance(message, Signal) and not self.signalled.done():
            self.signalled.set_result(message.number)

    async def run(self) -> int:
        """Bring the workers up, watch over them, and return the exit code."""
        living: asyncio.Future[Any] = asyncio.create_task(self._live())
        living.add_done_callback(lambda task: task.cancelled() or task.exception())
        ends = living, self.signalled, self.gone
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self.signalled.done():
            living.cancel()
            return await self._end_by_signal()
        # the scheduler's connections break at once, and are noticed one by one. Not cancelled: a
        # nanny that fails to start closes by itself
        await asyncio.wait([living, self.gone], timeout=SETTLE_S)
        if any(nanny.reason == upstream.SCHEDULER_CLOSED for nanny in self.workers.nannies):
            return 0
        if self.gone.done():
            raise ClusterError(
                f"the scheduler at {self.asked.scheduler} is gone, so the workers end. See what "
                f"the cluster's own process printed"
            )
        return await self._end(living.result())

    async def _live(self) -> dict[str, str | None]:
        """Start the workers, wait for the end of one, and return why those closed that did."""
        placements = await asyncio.to_thread(self._place)
        line = await connect_to_scheduler(
            self.asked.scheduler, self.spec.death_timeout, self.connection_args
        )
        self._watching = asyncio.create_task(self._watch_scheduler(line))

        def failed(name: str, text: str) -> NoReturn:
            raise ClusterError(
                f"a worker did not start: {text.rstrip('.')}. See its lines above, and hpcdask "
                f"doctor on this node"
            )

        await self.workers.start_workers(placements, self.asked.scheduler, self.access, failed)
        nannies = self.workers.nannies
        ends = {asyncio.ensure_future(nanny.wait_closed()): str(nanny.name) for nanny in nannies}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(ends, timeout=SETTLE_S)
        return {name: end.result() for end, name in ends.items() if end.done()}

    async def _watch_scheduler(self, line: Comm) -> None:
        with contextlib.suppress(OSError):
            await line.read()
        self.gone.set_result(None)

    def _place(self) -> list[WorkerPlacement]:
        found = self.workers.look()
        given = self._devices(found)
        gpus = tuple(gpu for gpu in given if gpu)
        what = plural(len(found.cores), "core")
        if gpus:
            names, uuids = dict.fromkeys(gpu.name for gpu in gpus), (gpu.uuid for gpu in gpus)
            what = f"{plural(len(gpus), 'GPU')} ({', '.join(names)} {', '.join(uuids)})"
        links = NodeLinks(found.host, gpus, found.fabric)
        choice = choose(self.spec, [links], alone=True)
        why = f" ({choice.reason})" if self.spec.protocol == "auto" and gpus else ""
        say(
            f"job {self.asked.job} on {found.host}: {plural(len(given), 'worker')} on {what}, "
            f"{choice.protocol}{why}"
        )
        for warning in slow_parts(self.spec, choice, on_device=bool(gpus)):
            say(f"warning: {warning}")
        named = dict(zip(self.asked.names(self.rank.index), given, strict=True))
        interface = choose_interface(self.spec, [links]).get(found.host)
        return place_workers(self.spec, named, [found], given, choice, interface)

    def _devices(self, found: Inventory) -> list[Gpu | None]:
        """Return a device for each worker: as many distinct GPUs, or the CPU."""
        wanted = self.asked.workers
        if self.spec.device == "cpu":
            return [None] * wanted
        job = job_id()
        if not found.gpus and self.spec.device == "auto" and job is None:
            say(NO_GPU_HERE)
            return [None] * wanted
        if len(found.gpus) < wanted:
            seen = f"only {plural(len(found.gpus), 'GPU')}" if found.gpus else "no GPU"
            raise DeviceError(
                f"{plural(wanted, 'worker')} and {seen} here. {how_to_request(job)}"
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

    async def _end(self, closed: Mapping[str, str | None]) -> int:
        """End the job as a whole, because of the workers that have closed."""
        siblings = self.asked.workers > 1 or self.rank.size > 1
        if siblings and (others := await self._hand_over()):
            say(
                f"worker {' and '.join(closed)} ended, so job {self.asked.job} ends as a whole, "
                f"with {' and '.join(sorted(others))}"
            )
        for name, reason in closed.items():
            if reason in ABNORMAL:
                why = "lost the scheduler" if reason else "is not there any more"
                raise ClusterError(f"worker {name} {why}; see above")
        return 0

    async def _end_by_signal(self) -> int:
        number = self.signalled.result()
        name = signal.Signals(number).name
        if self.workers.nannies and not self.gone.done():
            say(f"{name}: job {self.asked.job} hands over what its workers hold, and ends")
            await self._hand_over()
        else:
            say(f"{name}: job {self.asked.job} ends")
        return 128 + number

    async def _hand_over(self) -> set[str]:
        names = self.asked.names(0, self.rank.size)
        return await hand_over(self.asked.scheduler, self.connection_args, names)


async def connect_to_scheduler(
    address: str, timeout: float | None, connection_args: Mapping[str, Any]
) -> Comm:
    """Return a connection to the scheduler, or raise ClusterError; None waits for ever."""
    try:
        # connect's own deadline leaves out the handshake, and tells why it was missed
        async with asyncio.timeout(timeout + HANDSHAKE_DEADLINE_S if timeout else None):
            line: Comm = await connect(address, timeout=timeout or FOREVER_S, **connection_args)
            return line
    except Exception as error:  # what another program sends may be any
        waited = f" within {timeout:g} s" if timeout else ""
        raise ClusterError(
            f"no answer from the scheduler at {address}{waited}: {root_cause(error)}. See "
            f"whether the cluster still runs, and whether this node reaches that address"
        ) from error


async def hand_over(
    address: str, connection_args: Mapping[str, Any], names: Collection[str]
) -> set[str]:
    """Ask the scheduler to move elsewhere what workers hold; return those that were there."""
    there: set[str] = set()

    async def left(scheduler: Any) -> dict[str, str]:
        workers = (await scheduler.identity())["workers"].items()
        return {str(one["name"]): at for at, one in workers if str(one["name"]) in names}

    try:
        async with rpc(address, connection_args=connection_args) as scheduler:
            async with asyncio.timeout(ANSWER_DEADLINE_S):
                there = set(await left(scheduler))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HAND_OVER_DEADLINE_S):
                    while some := await left(scheduler):  # a replacement may come and take it
                        await scheduler.retire_workers(names=[*some], close_workers=True)
                        await asyncio.sleep(HAND_OVER_PAUSE_S)
            async with asyncio.timeout(ANSWER_DEADLINE_S):
                for name, at in (await left(scheduler)).items():
                    say(f"nobody took in time what {name} holds: Dask computes it again")
                    reason = f"job-ends-{name}"
                    await scheduler.unregister(address=at, expected=True, stimulus_id=reason)
    except TimeoutError:
        say("the scheduler does not take over what the workers hold: it does not answer")
    except Exception as error:  # whatever the scheduler answers, this job ends
        say(f"the scheduler does not take over what the workers hold: {root_cause(error)}")
    return there
