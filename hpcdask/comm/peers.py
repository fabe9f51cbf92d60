"""Workers that exchange data over ucx, and speak tcp (TLS) with everybody else."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import dask
from distributed import Worker
from distributed.comm import Comm, get_address_host, unparse_host_port
from distributed.config import defaults
from distributed.core import ConnectionPool, Status, send_recv
from distributed.protocol import to_serialize
from distributed.utils import get_ip

from hpcdask.errors import ClusterError, root_cause
from hpcdask.logs import complain
from hpcdask.process import mark
from hpcdask.security import webserver
from hpcdask.upstream import distributed as upstream

from .cuda_ipc import Mappings, release_of_the_dead
from .warmup import TOPIC, LinkTest, choose_peers, connect_timeout

logger = logging.getLogger("distributed.hpcdask.peers")

#: Operations that workers ask of each other.
CONTACT, BLOCK, WARM = "hpcdask_contact", "hpcdask_block", "hpcdask_warm"
#: Attempts to reach a worker over ucx, and seconds of tcp after each that fails.
ATTEMPTS, PAUSE_S = 3, 10.0
WARM_DEADLINE_S = 60.0
#: Bytes of the block that maps a peer's memory, and of the one that shows how fast it comes.
FIRST_NBYTES, MEASURED_NBYTES = 2**22, 2**26
MEASUREMENTS = 5
#: The module that is imported only where the worker is to use UCX.
UCX = "hpcdask.comm.ucx"
#: Modules by which distributed sends device memory; their numba takes half a second to load.
SENDING = ("distributed.protocol.rmm", "distributed.protocol.cupy")
#: Bytes that a worker asks of another in one message, where the user did not change distributed's
#: 50 MB: one of device memory takes 4 ms besides the time of its bytes on NVLink.
MESSAGE_NBYTES = 2**31
#: States in which a worker is of use.
WORKING = (Status.running, Status.paused)


@dataclass
class Route:
    """Way over ucx to one worker: where it listens, None until asked, and failed attempts."""

    contact: str | None = None
    failures: int = 0
    retry_at: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def may_be_tried(self) -> bool:
        """Return whether the next connection should be over ucx."""
        return self.failures < ATTEMPTS and time.monotonic() >= self.retry_at

    def fail(self, addr: str, error: Exception) -> None:
        """Note a failed attempt; attempts side by side are one."""
        if (now := time.monotonic()) < self.retry_at:
            return
        self.failures, self.retry_at, self.contact = self.failures + 1, now + PAUSE_S, None
        if self.failures == ATTEMPTS:
            reason = f"no ucx to {addr} in {ATTEMPTS} attempts: {root_cause(error)}"
            text = "%s. Data fetched there comes over tcp from now on, which is slower"
            logger.warning(text, reason)


class PeerPool(ConnectionPool):
    """A worker's connections, set up by `attend`: ucx to other workers, tcp to all else."""

    # distributed's own pool becomes one of these, so it has no constructor
    def attend(self, me: PeerWorker, apart: Iterable[str]) -> None:
        """Begin to ask peers for ucx, except those apart: the scheduler and the nanny."""
        self.me = me
        self.apart = set(apart)
        self.routes: dict[str, Route] = {}

    async def _connect(self, addr: str, timeout: float | None = None) -> Comm:
        if addr in self.apart or not await self.me.may_use_ucx_to(addr):
            return await super()._connect(addr, timeout)
        route = self.routes.setdefault(addr, Route())
        async with route.lock:
            if route.may_be_tried() and route.contact is None:
                await self._ask(addr, route, timeout)
        if (contact := route.contact) and route.may_be_tried():
            try:
                comm: Comm = await super()._connect(contact, timeout)
            except OSError as error:
                route.fail(addr, error)
            else:
                route.failures = 0
                del self.occupied[contact]
                self.occupied[addr].add(comm)
                return comm
        return await super()._connect(addr, timeout)

    async def _ask(self, addr: str, route: Route, timeout: float | None) -> None:
        """Ask a worker where it listens on ucx; a busy one is asked again later."""
        comm = await super()._connect(addr, timeout)
        try:
            async with asyncio.timeout(connect_timeout()):
                # closed, or it would be taken for one that carries data
                answer = await send_recv(comm, op=CONTACT, asker=self.me.address, close=True)
        except TimeoutError as error:
            route.fail(addr, error)
            return
        finally:
            self.reuse(addr, comm)
        route.contact = answer["address"] if answer else ""
        if answer:
            from . import ucx

            ucx.known_secrets[answer["address"]] = answer["secret"]

    def reuse(self, addr: str, comm: Comm) -> None:
        """Keep a connection for the next transfer, unless that should try ucx again."""
        route = self.routes.get(addr)
        if route is not None and route.failures and route.may_be_tried():
            comm.abort()
        super().reuse(addr, comm)

    def remove(self, addr: str, **kwargs: Any) -> None:
        """Forget a worker that is gone."""
        self.routes.pop(addr, None)
        super().remove(addr, **kwargs)


class PeerWorker(Worker):
    """A worker that may talk ucx to its peers, and gets warm before it is used."""

    def __init__(
        self,
        *args: Any,
        exchange: str = "tcp",
        on_device: bool = False,
        reach: str = "all",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.exchange = exchange
        self.reach = reach
        self.on_device = on_device
        self._ucx_address: str | None = None
        self._decided = asyncio.Event()
        self._warming: asyncio.Task[None] | None = None
        self._mappings = Mappings()
        self._releasing: asyncio.Task[None] | None = None
        self.handlers |= {CONTACT: self._tell_contact, BLOCK: self._give_block, WARM: self._fetch}
        pool: Any = self.rpc
        pool.__class__ = PeerPool
        pool.attend(self, filter(None, [self.scheduler.address, self.nanny]))

    @property
    def is_warm(self) -> bool:
        """Return whether the first exchange with its peers is over."""
        return self._warming is not None and self._warming.done()

    @property
    def peer_transports(self) -> dict[str, str]:
        """Address of each peer that was dialled, to ``ucx`` or ``tcp``."""
        pool: Any = self.rpc
        return {
            addr: "ucx" if route.contact and not route.failures else "tcp"
            for addr, route in pool.routes.items()
        }

    async def may_use_ucx_to(self, address: str) -> bool:
        """Return whether to try ucx to a worker, once it is known whether ucx starts here."""
        await self._decided.wait()
        if self._ucx_address is None:
            return False
        return self.reach == "all" or get_address_host(address) == get_address_host(self.address)

    async def listen(self, *args: Any, **kwargs: Any) -> None:
        """Listen on tcp, and on ucx where that was asked for by name and has to work."""
        await super().listen(*args, **kwargs)
        reason = ""
        try:
            if self.exchange == "ucx":
                await self._listen_on_ucx()
        except Exception as error:  # which cannot be pickled, not even as a context
            reason = f"--protocol ucx: ucx does not start: {root_cause(error)}"
        if reason:
            text = f"{reason}. See UCX_TLS, UCX_NET_DEVICES and hpcdask doctor"
            # a nanny does not hear why its worker does not start
            complain(f"worker {self.name}: {text}")
            raise ClusterError(text)

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """Serve the worker's pages, with limits."""
        super().start_http_server(*args, **kwargs)
        webserver.guard(self)

    async def _listen_on_ucx(self) -> None:
        from . import ucx

        ucx.register()
        host, devices = get_address_host(self.address), os.environ.get("UCX_NET_DEVICES", "lo")
        if host == "127.0.0.1" and "lo" not in devices.split(","):
            host = get_ip()  # UCX does not listen on the loopback
        await super().listen(f"ucx://{unparse_host_port(host)}:0")
        self._ucx: Any = self.listeners[-1]
        self._ucx_address = self._ucx.contact_address

    async def _decide(self) -> None:
        """Start ucx where it is only the better way: with the worker up, which needs none yet."""
        try:
            if self.exchange != "tcp":
                # not in a thread: two that imported at the same time ended in a deadlock
                load([UCX, *(SENDING if self.on_device else ())])
                if self.exchange == "auto":
                    await self._listen_on_ucx()
                if self.on_device:
                    self._use_device_memory()
        except Exception as error:
            self.exchange = "tcp"
            text = "ucx does not start in worker %s, which exchanges data over tcp: %s"
            logger.warning(text, self.name, root_cause(error))
        finally:
            mark("transport started")
            self._decided.set()

    def _use_device_memory(self) -> None:
        """Fetch more in one message, unless the user said how much; release what peers leave."""
        from . import ucx

        limit = "distributed.worker.transfer.message-bytes-limit"
        if dask.config.get(limit) == dask.config.get(limit, config=defaults):
            upstream.set_message_limit(self, MESSAGE_NBYTES)
        self._mappings = Mappings(ucx.version())
        release = release_of_the_dead(self._mappings, ucx.progress().turn)
        self._releasing = asyncio.create_task(release)

    async def start_unsafe(self) -> Any:
        """Start, then get warm while the user's program starts."""
        result = await super().start_unsafe()
        mark("registered")
        self._warming = asyncio.create_task(self._warm())
        return result

    async def close(self, *args: Any, **kwargs: Any) -> Any:
        for task in (self._warming, self._releasing):
            if task is not None:
                task.cancel()
        return await super().close(*args, **kwargs)

    async def _tell_contact(self, asker: str) -> dict[str, Any] | None:
        if not await self.may_use_ucx_to(asker):
            return None
        return {"address": self._ucx_address, "secret": self._ucx.secret}

    # The first exchange

    async def _give_block(self, count: int) -> dict[str, Any]:
        block = importlib.import_module("cupy" if self.on_device else "numpy").zeros(count, "u1")
        return {"data": to_serialize(block), "memory": self._mappings.tell()}

    async def _fetch(self, source: str, name: str) -> dict[str, Any]:
        """Fetch from one peer for the first time, and again to see how fast it is."""
        same = get_address_host(source) == get_address_host(self.address)
        link = LinkTest(str(self.name), name, same_host=same, unknown_ucx=self._mappings.unknown)
        try:
            async with asyncio.timeout(WARM_DEADLINE_S):
                await self._time_block(source, FIRST_NBYTES)
                count = MEASURED_NBYTES if self.on_device else FIRST_NBYTES
                # the best of some: the event loop is held up while another link comes up
                timed = [await self._time_block(source, count) for _ in range(MEASUREMENTS)]
        except Exception as error:
            return asdict(replace(link, problem=root_cause(error)))
        rate, theirs = count / min(seconds for seconds, _ in timed), timed[-1][1]
        cuda_ipc = self._mappings.shared_with(theirs) if same and self.on_device else None
        transport = self.peer_transports.get(source, "tcp")
        return asdict(replace(link, transport=transport, rate=rate, cuda_ipc=cuda_ipc))

    async def _time_block(self, source: str, count: int) -> tuple[float, Any]:
        start = time.perf_counter()
        answer = await self.rpc(source).hpcdask_block(count=count)
        return time.perf_counter() - start, answer["memory"]

    async def _warm(self) -> None:
        """Fetch from those that were there before, and have them fetch from here."""
        links: list[dict[str, Any]] = []
        try:
            await self._decide()
            if self._ucx_address:
                await self._exchange_blocks(links)
        except Exception as error:
            links.append(asdict(LinkTest(str(self.name), "", problem=root_cause(error))))
        if self.status not in WORKING:
            return
        mark("warm")
        self.log_event(TOPIC, {"name": str(self.name), "links": links})

    async def _exchange_blocks(self, links: list[dict[str, Any]]) -> None:
        known = (await self.scheduler.identity())["workers"]
        near = [address for address in known if await self.may_use_ucx_to(address)]
        me = {"source": self.address, "name": str(self.name)}
        for peer in choose_peers(self.address, near):
            name = str(known[peer]["name"])
            links.append(await self._fetch(peer, name))
            try:
                async with asyncio.timeout(WARM_DEADLINE_S):
                    links.append(dict(await self.rpc(peer).hpcdask_warm(**me)))
            except Exception as error:
                problem = root_cause(error)
                links.append(asdict(LinkTest(name, str(self.name), problem=problem)))


def load(modules: Iterable[str]) -> None:
    """Import those of the modules that are there, for whoever imports them later."""
    for name in modules:
        with contextlib.suppress(ImportError):  # whoever needs it says so
            importlib.import_module(name)
