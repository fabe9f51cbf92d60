"""One worker: bound to its device and cores before anything of Dask or CUDA starts in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distributed import Nanny, Security
from distributed.comm import CommClosedError, get_address_host, unparse_host_port
from distributed.core import Status
from distributed.utils import get_ip
from distributed.worker_state_machine import ExecuteFailureEvent

from . import template
from .bootstrap import resources
from .client.batching import BATCH_INTERVAL_S
from .comm.peers import UCX, PeerWorker, load
from .comm.transport import Reach
from .comm.ucx_config import ucx_environment
from .comm.ucx_hooks import environment
from .errors import ClusterError, HpcdaskError, MissingExtra, root_cause
from .gpu import context, memory, oom
from .gpu.context import CONTEXT_MADE, make_context
from .gpu.devices import Gpu
from .gpu.driver import cuda_extra
from .gpu.memory_plan import ON_HOST, MemoryPlan
from .logs import quiet, say
from .process import mark, marks
from .scout import Scout
from .security import listening
from .spec.specs import WorkerSpec

#: Why workers are closed at the end of a run, as they are told.
RUN_IS_OVER = "the run is over"
#: Failed starts in a row after which a dead worker is given up, and seconds after the first of
#: them; twice as long after each further one.
RESTART_ATTEMPTS = 5
RESTART_PAUSE_S = 1.0
NOT_RESTARTED = "the worker did not start again"
#: Seconds that the failure of a Dask task gets to reach the scheduler before its worker ends.
TOLD_DEADLINE_S = 1.0


@dataclass(frozen=True)
class Place:
    """Where one worker runs.

    Attributes
    ----------
    name
        The worker's name.
    gpu
        Its GPU, or None for the CPU.
    cores
        CPU cores it may run on.
    nthreads
        Threads for Dask tasks.
    memory_limit
        Bytes of host memory; 0 for no limit.
    protocol
        ``tcp`` or ``ucx``, between workers.
    reach
        Whether ucx is for ``all`` workers, or for those of one ``node`` among each other.
    interface
        Network interface to listen on; None for the one that leads to the scheduler.
    device_memory
        How it uses the memory of its GPU.
    """

    name: str
    gpu: Gpu | None
    cores: tuple[int, ...]
    nthreads: int
    memory_limit: int
    protocol: str = "tcp"
    reach: Reach = "all"
    interface: str | None = None
    device_memory: MemoryPlan = ON_HOST

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Place:
        """Read what ``dataclasses.asdict`` and JSON made of a place."""
        read = {
            "gpu": data["gpu"] and Gpu.from_json(data["gpu"]),
            "cores": tuple(data["cores"]),
            "device_memory": MemoryPlan.from_json(data["device_memory"]),
        }
        return cls(**{**data, **read})


class BoundWorker(PeerWorker):
    """distributed's worker, bound to a place first.

    Parameters
    ----------
    bind_cores
        CPU cores to run on.
    bind_gpu
        UUID of the GPU whose CUDA context to make, before any transport starts; None for none.
    device_memory
        How to use its memory.
    restarted
        Whether it takes the place of a worker that died.
    """

    def __init__(
        self,
        *args: Any,
        bind_cores: Sequence[int] = (),
        bind_gpu: str | None = None,
        device_memory: MemoryPlan = ON_HOST,
        restarted: bool = False,
        **kwargs: Any,
    ) -> None:
        template.leave_signals_to_the_rank()
        quiet()
        mark("worker forked")
        if bind_cores:
            resources.widen_threads(bind_cores)
        if bind_gpu is not None:
            try:
                with loading(_needed(device_memory, kwargs.get("exchange", "tcp"))):
                    make_context()
                    if all(event != CONTEXT_MADE for _, event in marks):  # by `hpcdask.prestart`
                        mark(CONTEXT_MADE)
                mark("packages imported")
                memory.apply(device_memory, restarted=restarted)
            except HpcdaskError:
                quiet("CRITICAL")  # the nanny says it, in one line
                raise
            mark("device memory set up")
        self.device_memory = device_memory
        self._context_lost = False
        super().__init__(*args, on_device=bind_gpu is not None, **kwargs)
        self.batched_stream.interval = BATCH_INTERVAL_S

    async def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Run a Dask task, and survive that its device is full, or that it broke the context."""
        event = await super().execute(*args, **kwargs)
        event = await oom.explained(self, self.device_memory, event)
        if self.on_device and isinstance(event, ExecuteFailureEvent) and (why := context.lost()):
            if self._context_lost:  # it failed for the fault of another, and is run again elsewhere
                await asyncio.Event().wait()
            self._context_lost = True
            self._replacing = asyncio.create_task(self._replace(str(event.key), why))
        return event

    async def _replace(self, key: str, why: str) -> None:
        """End this process, whose every call to CUDA fails by now; the nanny starts another."""
        say(
            f"worker {self.name}: Dask task {key} left the GPU's context unusable ({why}). The "
            f"worker is replaced, and what it held is computed again"
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TOLD_DEADLINE_S):
                # the worker's state machine has no event for it
                while key in {task.key for task in self.state.executing}:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await self.batched_stream.close()
        os._exit(1)

    async def gather_dep(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch from another worker, and survive that the device is full."""
        event = await super().gather_dep(*args, **kwargs)
        return await oom.explained(self, self.device_memory, event)

    def handle_worker_status_change(self, status: str, stimulus_id: str) -> None:
        """Being retired is no reason to complain that the scheduler does not know it any more."""
        quiet("ERROR" if status == Status.closing_gracefully.name else "WARNING")
        super().handle_worker_status_change(status, stimulus_id)

    async def close(self, *args: Any, **kwargs: Any) -> Any:
        """Close, without complaints about what is closed already."""
        quiet("CRITICAL")
        try:
            return await super().close(*args, **kwargs)
        except CommClosedError:
            # Its nanny ended while it was told, and distributed's worker stays half closed then
            os._exit(1)


class BoundNanny(Nanny):
    """A nanny that starts again what fails to start, up to a limit.

    Attributes
    ----------
    reason
        Why its worker closed for good, as distributed names it; None if that was not said.
    early
        The scout, which may have a process that is ready to be the first worker.
    """

    def __init__(self, scheduler: str, *, env: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(scheduler, env=dict(env), **kwargs)
        self.reason: str | None = None
        self.early: Scout | None = None
        self._own_env = dict(env)
        self._dismissed = asyncio.Event()
        self._starting = asyncio.Lock()
        self._exit_code: int | None = None
        listening.prepare()

    async def listen(self, *args: Any, **kwargs: Any) -> None:
        """Listen, with limits for strangers."""
        await super().listen(*args, **kwargs)
        listening.guard(self)

    def close_gracefully(self, reason: str = "nanny-close-gracefully") -> None:
        """The worker closes for good, and says why."""
        self.reason = reason
        self._dismissed.set()
        super().close_gracefully(reason=reason)

    async def over(self) -> str | None:
        """Wait until the worker closes for good; return `reason`."""
        ends = [
            asyncio.ensure_future(self.finished()),
            asyncio.ensure_future(self._dismissed.wait()),
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        return self.reason

    async def instantiate(self) -> Status:
        """Start the worker; after its death again, at growing intervals if that fails."""
        early, self.early = self.early, None
        if early is not None and early.uuid is not None:
            if self._would_be(early.uuid):
                template.offer(*early.give())
            else:  # before its context is in the way of the worker's
                await asyncio.to_thread(early.dismiss)
        async with self._starting:
            if self.status == Status.running:
                return await self._start_again()
            self._exit_code = None  # its first start, or it is closing
            status = await super().instantiate()
            if status != Status.running and (how := self._end_of_process()):
                raise ClusterError(f"its process {how} while it started")
            return status

    def _is_over(self) -> bool:
        return self.status != Status.running

    async def _start_again(self) -> Status:
        for attempt in range(1, RESTART_ATTEMPTS + 1):
            if self._is_over() or self.process is None:
                return Status.failed
            status: Status = self.process.status
            if status == Status.running:  # by another call
                return status
            self.process.worker_kwargs["restarted"] = True
            self._exit_code = None
            try:
                async with asyncio.timeout(self.death_timeout or None):
                    if await self.process.start() == Status.running:
                        return Status.running
                why = f"its process {self._end_of_process() or 'did not register'}"
            except TimeoutError:  # what has hung so long is ended with the nanny
                why, attempt = f"it took more than {self.death_timeout:g} s", RESTART_ATTEMPTS
            except Exception as error:
                why = root_cause(error)
            pause = RESTART_PAUSE_S * 2 ** (attempt - 1)
            then = f"next attempt in {pause:g} s" if attempt < RESTART_ATTEMPTS else "given up"
            say(f"warning: worker {self.name} does not start again: {why}; {then}")
            if attempt == RESTART_ATTEMPTS:
                break
            await asyncio.sleep(pause)
        # not in this task, which belongs to what is closed
        self.loop.add_callback(self.close, reason=NOT_RESTARTED)
        return Status.failed

    def _end_of_process(self) -> str:
        """How the worker's process ended, in words; empty if it was not seen to end."""
        code = self._exit_code
        if code is None:
            return ""
        return (
            f"ended with exit code {code}"
            if code >= 0
            else f"was killed by {signal.Signals(-code).name}"
        )

    def _on_worker_exit_sync(self, exitcode: int) -> None:
        self._exit_code = exitcode
        super()._on_worker_exit_sync(exitcode)

    def _would_be(self, uuid: str) -> bool:
        """Whether a process that has its context on this GPU, and its imports, is like the worker.

        The driver and libraries have read their variables by then, and Dask's configuration and
        plugins may add some.
        """
        others = self.env.items() - self._own_env.items() - self.pre_spawn_env.items()
        same = all(os.environ.get(name) == value for name, value in others)
        return same and self.env["CUDA_VISIBLE_DEVICES"] == uuid


def _needed(plan: MemoryPlan, exchange: str) -> list[str]:
    """What the worker imports before it registers."""
    needed = list(plan.libraries)
    if plan.allocator != "cuda":
        needed += ["rmm", *(f"rmm.allocators.{library}" for library in plan.libraries)]
    return [*needed, UCX] if exchange == "ucx" else needed


@contextlib.contextmanager
def loading(modules: Sequence[str]) -> Iterator[None]:
    """Import in a thread while the driver makes the context, which takes as long.

    Parameters
    ----------
    modules
        What must be there at the end of the block.
    """
    thread = threading.Thread(target=load, args=(modules,), name="imports", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def check_extras(*, cuda: bool) -> None:
    """Refuse to start workers on GPUs without the package that makes their context.

    Raises
    ------
    MissingExtra
        Naming the extra to install.
    """
    from importlib.util import find_spec

    try:
        found = find_spec("cuda.bindings") if cuda else True
    except ModuleNotFoundError:
        found = None
    if not found:
        raise MissingExtra("cuda-bindings", cuda_extra(), "a worker on a GPU")


def make_nanny(
    spec: WorkerSpec,
    place: Place,
    *,
    scheduler: str,
    security: Security,
    scratch: str,
    tells: bool = False,
) -> BoundNanny:
    """The nanny of one worker; await it to start both.

    Parameters
    ----------
    spec, place
        What the worker is and where.
    scheduler
        Its address.
    security
        Credentials, or an empty Security for plain tcp.
    scratch
        Folder for spilled data, removed by the rank.
    tells
        Whether the worker itself writes that it is warm.
    """
    tcp = "tls" if security.require_encryption else "tcp"
    if place.interface is None:
        # nanny and worker listen on the network of the scheduler only; by itself a worker would
        # listen on all
        host = unparse_host_port(get_ip(get_address_host(scheduler)))
    else:
        host = None
    exchange = place.protocol
    if exchange == "ucx" and spec.protocol == "auto":
        exchange = "auto"  # what was not asked for by name may fail to start
    optional = {
        "host": host,
        "lifetime": spec.lifetime and f"{spec.lifetime} s",
        "lifetime_stagger": spec.lifetime_stagger and f"{spec.lifetime_stagger} s",
        "lifetime_restart": spec.lifetime_restart or None,
        "preload": list(spec.preload) or None,
        "preload_nanny": list(spec.preload_nanny) or None,
        "data": memory.store(place.device_memory, place.memory_limit),
    }
    return BoundNanny(
        scheduler,
        name=place.name,
        nthreads=place.nthreads,
        memory_limit=place.memory_limit,
        local_directory=scratch,
        resources=spec.resources,
        security=security,
        interface=place.interface,
        death_timeout=spec.death_timeout,
        protocol=tcp,
        worker_class=BoundWorker,
        dashboard=False,
        # none where it computes on the CPU: the job may have GPUs all the same
        env={
            "CUDA_VISIBLE_DEVICES": place.gpu.uuid if place.gpu else "",
            **environment(os.environ),
            **ucx_environment(spec, os.environ),
        },
        exchange=exchange,
        reach=place.reach,
        tells=tells,
        bind_cores=place.cores,
        bind_gpu=place.gpu and place.gpu.uuid,
        device_memory=place.device_memory,
        **{name: value for name, value in optional.items() if value is not None},
    )


def check_preloads(spec: WorkerSpec) -> None:
    """Find what workers and nannies are to load, before any of them starts.

    Raises
    ------
    UsageError
        There is no such file, or no such package. Packages are not imported for it.
    """
    import importlib.util
    import sys

    from .errors import UsageError

    for option, names in (("--preload", spec.preload), ("--preload-nanny", spec.preload_nanny)):
        for name in names:
            top = name.partition(".")[0]
            if " " in name or "://" in name:  # a program's text, or on the web
                break  # which may make importable what comes after it
            if name.endswith(".py"):
                if os.path.exists(name):
                    break
                what = f"the file {name} is not there (looked in {os.getcwd()})"
            elif top and (top in sys.modules or importlib.util.find_spec(top)):
                continue
            else:
                what = f"there is no module {top or name} (a file's name ends in .py)"
            raise UsageError(f"{option} {name}: {what}, on {socket.gethostname()}")
