"""gang(): one function at once on several workers, as MPI, NCCL and torch.distributed need it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcdask.errors import GangError, UsageError
from hpcdask.logs import plural, say
from hpcdask.security import ports
from hpcdask.spec.parsing import parse_deadline

if TYPE_CHECKING:
    from distributed import Client, Future, Worker

#: How often it is tried again when a worker is lost before any rank was called.
ATTEMPTS = 3
#: Its ranks come before other Dask tasks that wait on their workers.
PRIORITY = 1000
#: What of a context is an environment variable, in capitals.
VARIABLES = (
    "rank",
    "world_size",
    "local_rank",
    "local_world_size",
    "master_addr",
    "master_port",
)
#: Seconds in which the scheduler tells of a failure that has reached the client.
TOLD_S = 5.0


@dataclass(frozen=True)
class RankContext:
    """Rank, size and meeting point of a gang's call; the first argument of the function.

    Attributes
    ----------
    rank, world_size
        Which of how many calls this is.
    local_rank, local_world_size
        The same among those on this host.
    master_addr, master_port
        Where rank 0 can listen: its address, and a port that was free on it.
    interface
        Network interface that the cluster uses on this host; empty if it is not known.
    device
        What the worker computes on, as torch calls it: ``"cuda:0"`` or ``"cpu"``. A worker sees its
        own GPU only, so that is 0 whatever the local rank.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    interface: str
    device: str

    def environment(self) -> dict[str, str]:
        """The environment variables that stand for it during the call."""
        variables = {name.upper(): str(getattr(self, name)) for name in VARIABLES}
        if self.interface:  # NCCL takes a name for the beginning of one, unless it has a =
            for name, value in (("NCCL", f"={self.interface}"), ("GLOO", self.interface)):
                if f"{name}_SOCKET_IFNAME" not in os.environ:
                    variables[f"{name}_SOCKET_IFNAME"] = value
        return variables


def gang(
    function: Callable[..., Any],
    *arguments: Sequence[Any],
    client: Client | None = None,
    size: int | None = None,
    timeout: str | float = "1h",
    shared: Mapping[str, Any] | None = None,
    grace: str | float = "5s",
) -> Any:
    """Call a function on several workers at once, all or none, and return the results by rank.

    The calls can talk to each other in their own way: torch.distributed, NCCL, Gloo, XGBoost,
    sockets. Rank 0 finds a free port for it.

    Parameters
    ----------
    function
        Called as ``function(context, *items, **shared)``, once on each worker; `context` is a
        `RankContext`.
    *arguments
        Sequences of one item per rank. Items may be futures; a rank then goes to the worker that
        has its data, if that is free.
    client
        By default the current one.
    size
        How many workers. By default as many as `arguments` have items; without any, all.
    timeout
        How long it may take, the wait for workers included.
    shared
        Keyword arguments that are the same for all ranks.
    grace
        How long calls may run on once the gang has failed. Workers that are not free by then are
        restarted.

    Returns
    -------
    list
        The results by rank. With an asynchronous client, an awaitable of it.

    Raises
    ------
    UsageError
        The cluster has too few workers, or arguments differ in length.
    GangError
        A rank failed, lost its worker, or took too long. ``__cause__`` is what it raised.
    """
    from distributed import get_client

    items = [_items(argument) for argument in arguments]
    number = _size(items, size)
    return _Gang(
        client or get_client(),
        function,
        list(zip(*items, strict=True)),
        dict(shared or {}),
        size=number,
        timeout_s=parse_deadline(timeout, "gang: timeout"),
        grace_s=parse_deadline(grace, "gang: grace"),
    ).start()


def _size(items: Sequence[Sequence[Any]], size: int | None) -> int | None:
    """Return how many ranks the arguments are for; None if nothing says so."""
    sizes = {len(one) for one in items} | ({size} if size is not None else set())
    if len(sizes) > 1 or 0 in sizes:
        raise UsageError(
            f"gang: every argument is a sequence of one item per rank, and these have "
            f"{', '.join(map(str, sorted(sizes)))} (size included). What all share goes into shared"
        )
    return min(sizes, default=None)


def _items(argument: Sequence[Any]) -> list[Any]:
    from distributed import Future

    if isinstance(argument, str | bytes | Mapping | Future) or not hasattr(argument, "__len__"):
        raise UsageError(
            f"gang: an argument is a sequence of one item per rank, not "
            f"{type(argument).__name__}. What all ranks share goes into shared"
        )
    return list(argument)


@dataclass
class _Gang:
    """A call of `gang` in the client's event loop."""

    client: Client
    function: Callable[..., Any]
    items: list[tuple[Any, ...]]
    shared: dict[str, Any]
    size: int | None
    timeout_s: float
    grace_s: float

    def start(self) -> Any:
        """Run it; an awaitable if the client is asynchronous."""
        return self.client.sync(self.run)

    async def run(self) -> list[Any]:
        """Try until all ranks were called, and return their results."""
        from . import gang_scheduler

        scheduler: Any = self.client.scheduler
        await self.client.run_on_scheduler(gang_scheduler.install, asynchronous=True)
        if self.size is None:
            self.size = (await scheduler.identity(n_workers=0))["n_workers"]
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        for _ in range(ATTEMPTS):
            name = uuid.uuid4().hex
            futures: list[Future[Any]] = []
            ended: dict[str, Any] = {}
            try:
                async with asyncio.timeout_at(deadline):
                    return await self._attempt(scheduler, name, futures)
            except _NotStarted as lost:
                error: GangError = lost.error
            except TimeoutError:
                ended = await self._end(scheduler, name, futures)
                raise self._too_late(ended) from None
            finally:
                if not ended:
                    await asyncio.shield(self._end(scheduler, name, futures))
        raise error

    async def _attempt(self, scheduler: Any, name: str, futures: list[Future[Any]]) -> list[Any]:
        """Take workers, call all ranks and wait for them; `futures` gets theirs."""
        import cloudpickle
        from dask.utils import funcname
        from distributed import wait
        from distributed.client import futures_of

        held = [futures_of(list(items)) for items in self.items]
        data = {future for one in held for future in one} | set(futures_of(self.shared))
        if data:
            await wait(list(data))
        keys = [f"{funcname(self.function)}-gang-{name}-{rank}" for rank in range(self.size or 0)]
        addresses = await scheduler.gang_reserve(
            gang=name,
            client=self.client.id,
            size=self.size,
            keys=keys,
            held=[[future.key for future in one] for one in held],
        )
        if isinstance(addresses, int | float):
            raise UsageError(
                f"a gang of {self.size} needs as many workers, and the cluster has "
                f"{int(addresses)}. Ask for a smaller size, or scale the cluster first"
            )
        pickled = cloudpickle.dumps(self.function)
        for rank, address in enumerate(addresses):
            arguments = self.items[rank] if self.items else ()
            call = (pickled, name, rank, self.shared, *arguments)
            place = {"workers": [address], "allow_other_workers": False, "priority": PRIORITY}
            futures.append(
                self.client.submit(call_rank, *call, key=keys[rank], retries=0, pure=False, **place)
            )
        return await self._results(scheduler.gang_failure(gang=name), futures)

    async def _results(
        self, failing: Coroutine[Any, Any, Any], futures: list[Future[Any]]
    ) -> list[Any]:
        """Wait for all ranks, or for the first failure, which is raised."""
        from distributed import wait

        async def gather() -> list[Any]:
            await wait(futures)
            if any(future.status == "error" for future in futures):
                await asyncio.wait({watching}, timeout=TOLD_S)
            return list(await self.client.gather(futures, asynchronous=True))

        watching = asyncio.ensure_future(failing)
        gathering = asyncio.ensure_future(gather())
        try:
            await asyncio.wait({gathering, watching}, return_when=asyncio.FIRST_COMPLETED)
            failure = watching.result() if watching.done() else None
            if failure is not None:
                raise await _error(failure, futures)
            return await gathering
        finally:
            for task in (gathering, watching):
                task.cancel()
            await asyncio.gather(gathering, watching, return_exceptions=True)

    async def _end(self, scheduler: Any, name: str, futures: list[Future[Any]]) -> dict[str, Any]:
        """Cancel what still runs, and let its workers go; say which of them are restarted."""
        if any(future.status != "finished" for future in futures):
            await self.client.cancel(futures, asynchronous=True, force=True)
        ended: dict[str, Any] = await scheduler.gang_end(gang=name, grace_s=self.grace_s)
        for rank, worker in ended["stuck"].items():
            say(
                f"gang: rank {rank} did not end within {self.grace_s:g} s, so worker {worker} is "
                f"restarted. What it held is computed again"
            )
        return ended

    def _too_late(self, ended: Mapping[str, Any]) -> GangError:
        calling: list[int] = ended["calling"]
        waited = f"gang of {self.size}: not done within {self.timeout_s:g} s"
        if not ended["started"]:
            return GangError(
                f"{waited}: its workers were not all there and free, or its arguments not yet "
                f"computed. Allow more time, or scale the cluster"
            )
        rank = calling[0] if len(calling) == 1 else None
        which = ", ".join(map(str, calling))
        return GangError(f"{waited}: {plural(len(calling), 'rank')} still ran: {which}", rank)


class _NotStarted(Exception):
    """A worker was lost before any rank was called."""

    def __init__(self, error: GangError) -> None:
        super().__init__(error)
        self.error = error


async def _error(failure: Mapping[str, Any], futures: Sequence[Future[Any]]) -> Exception:
    """Return the error of a failed gang, with the rank's own error as its cause."""
    rank, worker, host = failure["rank"], failure["worker"], failure["host"]
    cause = await futures[rank].exception() if failure["raised"] else None
    text = failure["text"] or repr(cause)
    what = f"rank {rank} of {len(futures)} failed on worker {worker}, host {host}: {text}"
    error = GangError(what, rank, worker, host)
    error.__cause__ = cause
    return error if failure["raised"] or failure["started"] else _NotStarted(error)


def call_rank(pickled: bytes, gang: str, rank: int, shared: Mapping[str, Any], *items: Any) -> Any:
    """The Dask task of one rank: wait for the others, and call the function.

    A worker that cannot import the function says so; distributed's own message would end it.
    """
    import cloudpickle
    from distributed import get_worker
    from distributed.comm import get_address_host
    from distributed.utils import sync

    worker: Any = get_worker()
    function = cloudpickle.loads(pickled)
    host = get_address_host(worker.address)
    with contextlib.ExitStack() as stack:
        port_range = getattr(worker, "port_range", None)
        port = stack.enter_context(_free_port(host, port_range)) if rank == 0 else 0
        told: dict[str, Any] = {"gang": gang, "rank": rank, "port": port}
        told["host"] = socket.gethostname()
        meeting: Any = sync(worker.loop, worker.scheduler.gang_arrive, **told)
    if not meeting:
        raise GangError("the gang ended before it began", rank)
    context = RankContext(**meeting, interface=_interface(host), device=_device(worker))
    # on a worker of several threads other Dask tasks run beside, in the same environment
    variables = context.environment() if worker.state.nthreads == 1 else {}
    try:
        with _in_environment(variables):
            return function(context, *items, **shared)
    finally:
        message = {"op": "gang-left", "gang": gang, "rank": rank}
        worker.loop.add_callback(worker.batched_stream.send, message)


@contextlib.contextmanager
def _free_port(host: str, port_range: str | None) -> Iterator[int]:
    """A port that nobody else gets before all ranks have come."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        ports.choose(lambda port: sock.bind(("", port)), port_range)
        yield sock.getsockname()[1]


@contextlib.contextmanager
def _in_environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


def _interface(host: str) -> str:
    """The network interface that has this address."""
    import psutil

    found = psutil.net_if_addrs().items()
    return next((name for name, own in found if host in (one.address for one in own)), "")


def _device(worker: Worker) -> str:
    on_device = getattr(worker, "on_device", bool(os.environ.get("CUDA_VISIBLE_DEVICES")))
    return "cuda:0" if on_device else "cpu"
