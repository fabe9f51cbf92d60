"""Call one function on several workers at once, as MPI, NCCL and torch.distributed need it."""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import cloudpickle
import psutil
from dask.utils import funcname
from distributed import Client, Future, get_client, get_worker, wait
from distributed.client import futures_of
from distributed.comm import get_address_host
from distributed.utils import sync

from hpcdask.errors import GangError, UsageError
from hpcdask.logs import plural, say
from hpcdask.security import ports
from hpcdask.spec.parsing import parse_deadline

from . import gang_scheduler

#: Priority over other Dask tasks that wait on the same workers.
PRIORITY = 1000


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
        names = [own.name for own in fields(self) if own.name not in ("interface", "device")]
        variables = {name.upper(): str(getattr(self, name)) for name in names}
        if self.interface:  # NCCL takes a name for a prefix, unless it begins with =
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
    for argument in arguments:
        if isinstance(argument, str | bytes | Mapping | Future) or not hasattr(argument, "__len__"):
            raise UsageError(
                f"gang: an argument is a sequence of one item per rank, not "
                f"{type(argument).__name__}. What all ranks share goes into shared"
            )
    sizes = {len(argument) for argument in arguments} | ({size} if size is not None else set())
    if len(sizes) > 1 or 0 in sizes:
        raise UsageError(
            f"gang: every argument is a sequence of one item per rank, and these have "
            f"{', '.join(map(str, sorted(sizes)))} (size included). What all share goes into shared"
        )
    number = min(sizes, default=None)
    limits = parse_deadline(timeout, "gang: timeout"), parse_deadline(grace, "gang: grace")
    client = client or get_client()
    ranks = list(zip(*arguments, strict=True))
    return client.sync(_run, client, function, ranks, dict(shared or {}), number, *limits)


async def _run(
    client: Client,
    function: Callable[..., Any],
    items: list[tuple[Any, ...]],
    shared: dict[str, Any],
    size: int | None,
    timeout_s: float,
    grace_s: float,
) -> list[Any]:
    """Call all ranks and return their results; end the gang in any case."""
    await client.run_on_scheduler(gang_scheduler.install, asynchronous=True)
    scheduler: Any = client.scheduler
    size = size or (await scheduler.identity(n_workers=0))["n_workers"]
    name = uuid.uuid4().hex
    futures: list[Future[Any]] = []

    async def end() -> dict[str, Any]:
        if any(future.status != "finished" for future in futures):
            await client.cancel(futures, asynchronous=True, force=True)
        ended: dict[str, Any] = await scheduler.gang_end(gang=name, grace_s=grace_s)
        for rank, worker in ended["stuck"].items():
            say(
                f"gang: rank {rank} did not end within {grace_s:g} s, so worker {worker} is "
                f"restarted. What it held is computed again"
            )
        return ended

    try:
        async with asyncio.timeout(timeout_s):
            return await _results(client, name, function, items, shared, size, futures)
    except TimeoutError:
        text = f"gang of {size}: not done within {timeout_s:g} s"
    finally:
        ended = await asyncio.shield(end())
    if not ended["started"]:
        raise GangError(
            f"{text}: its workers were not all there and free, or its arguments not yet "
            f"computed. Allow more time, or scale the cluster"
        )
    calling = ended["calling"]
    text += f": {plural(len(calling), 'rank')} still ran: {', '.join(map(str, calling))}"
    raise GangError(text, calling[0] if len(calling) == 1 else None)


async def _results(
    client: Client,
    name: str,
    function: Callable[..., Any],
    items: list[tuple[Any, ...]],
    shared: dict[str, Any],
    size: int,
    futures: list[Future[Any]],
) -> list[Any]:
    """Return the ranks' results, or raise the first failure; fill `futures` with their tasks."""
    scheduler: Any = client.scheduler
    data = [futures_of(list(own)) for own in items]
    if computing := [future for own in (*data, futures_of(shared)) for future in own]:
        await wait(computing)
    keys = [f"{funcname(function)}-gang-{name}-{rank}" for rank in range(size)]
    data_keys = [[future.key for future in own] for own in data]
    addresses = await scheduler.gang_reserve(
        gang=name, client=client.id, size=size, keys=keys, data=data_keys
    )
    if isinstance(addresses, int):
        raise UsageError(
            f"a gang of {size} needs as many workers, and the cluster has {addresses}. "
            f"Ask for a smaller size, or scale the cluster first"
        )
    pickled = cloudpickle.dumps(function)
    hosts = [get_address_host(address) for address in addresses]
    for rank, host in enumerate(hosts):
        local = hosts[:rank].count(host), hosts.count(host)
        context = RankContext(rank, size, *local, hosts[0], 0, "", "")
        call = (pickled, name, context, shared, *(items[rank] if items else ()))
        place = {"workers": [addresses[rank]], "allow_other_workers": False, "priority": PRIORITY}
        futures.append(
            client.submit(call_rank, *call, key=keys[rank], retries=0, pure=False, **place)
        )
    gathering = asyncio.ensure_future(client.gather(futures, errors="skip", asynchronous=True))
    failing = asyncio.ensure_future(scheduler.gang_failure(gang=name))
    try:
        await asyncio.wait({gathering, failing}, return_when=asyncio.FIRST_COMPLETED)
        if not failing.done() and len(results := list(gathering.result())) == size:
            return results
        failure = await failing
    finally:
        gathering.cancel()
        failing.cancel()
        await asyncio.gather(gathering, failing, return_exceptions=True)
    if failure is None:
        raise GangError(f"gang of {size}: the scheduler ended it, as it lost its client")
    rank, worker, host = failure["rank"], failure["worker"], failure["host"]
    cause = await futures[rank].exception() if failure["raised"] else None
    what = failure["text"] or repr(cause)  # failed arguments have no text
    text = f"rank {rank} of {size} failed on worker {worker}, host {host}: {what}"
    raise GangError(text, rank, worker, host) from cause


def call_rank(
    pickled: bytes, gang: str, context: RankContext, shared: Mapping[str, Any], *items: Any
) -> Any:
    """Wait for the other ranks, and call the function: the Dask task of one rank."""
    worker: Any = get_worker()
    function = cloudpickle.loads(pickled)
    host = get_address_host(worker.address)
    rank = context.rank
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        if rank == 0:  # nobody else gets the port before all ranks have arrived
            port_range = getattr(worker, "port_range", None)
            ports.choose(lambda port: sock.bind(("", port)), port_range)
        port = sync(
            worker.loop,
            worker.scheduler.gang_arrive,
            gang=gang,
            rank=rank,
            host=socket.gethostname(),
            port=sock.getsockname()[1] if rank == 0 else 0,
        )
    if not port:
        raise GangError("the gang ended before it began", rank)
    interfaces = psutil.net_if_addrs().items()
    own = (name for name, has in interfaces if host in (address.address for address in has))
    on_device = getattr(worker, "on_device", bool(os.environ.get("CUDA_VISIBLE_DEVICES")))
    device = "cuda:0" if on_device else "cpu"
    context = replace(context, master_port=port, interface=next(own, ""), device=device)
    # on a worker of several threads, other Dask tasks share the environment
    variables = context.environment() if worker.state.nthreads == 1 else {}
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        return function(context, *items, **shared)
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)
        message = {"op": "gang-left", "gang": gang, "rank": rank}
        worker.loop.add_callback(worker.batched_stream.send, message)
