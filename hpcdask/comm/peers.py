"""Workers that exchange data over ucx, and speak tcp (TLS) with everybody else.

A worker is known by its tcp address: the scheduler, clients and nannies dial that, and need no UCX.
Beside it the worker listens on ucx. One that wants data of another asks it once, over TLS, where
that is and by which secret it lets others in; from then on the two talk ucx.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import dask
from distributed import Worker
from distributed.comm import Comm, get_address_host, unparse_host_port
from distributed.config import defaults
from distributed.core import ConnectionPool, Status, send_recv
from distributed.protocol import to_serialize
from distributed.utils import get_ip

from hpcdask.errors import ClusterError, root_cause
from hpcdask.logs import complain, say
from hpcdask.process import mark, raise_descriptor_limit
from hpcdask.security import webserver
from hpcdask.upstream import distributed as upstream

from .cuda_ipc import Mappings, own_namespace, release_of_the_dead
from .warmup import TOPIC, LinkTest, choose_peers, evaluate

logger = logging.getLogger("distributed.hpcdask.peers")

#: What workers ask each other.
CONTACT, BLOCK, WARM = "hpcdask-contact", "hpcdask-block", "hpcdask-warm"
MAPPED = "hpcdask-mapped"
#: Seconds to ask a worker for its ucx address, or to fetch a block of it for the first time.
ASK_DEADLINE_S = 10.0
#: Seconds for a ucx connection, before tcp takes its place.
UCX_DEADLINE_S = 10.0
WARM_DEADLINE_S = 60.0
#: Bytes of the block that maps a peer's memory, and of the one that shows how fast it comes.
FIRST_NBYTES, MEASURED_NBYTES = 2**22, 2**26
MEASUREMENTS = 5
#: What lets workers exchange over ucx. It is imported where the worker is to use UCX only.
UCX = "hpcdask.comm.ucx"
#: How distributed sends device memory; numba comes with it, and takes half a second to load.
SENDING = ("distributed.protocol.rmm", "distributed.protocol.cupy")
#: Bytes that a worker asks of another in one message, where distributed's 50 MB are not set
#: otherwise: a worker has one message at a time from each of the others, and one of device memory
#: takes 4 ms besides what NVLink needs for its bytes.
MESSAGE_NBYTES = 2**31
#: While a worker is of use.
WORKING = (Status.running, Status.paused)


class PeerPool(ConnectionPool):
    """A worker's connections: ucx to other workers, tcp to all else.

    distributed's own pool becomes one of these, so it has no constructor; `attend` sets it up.
    """

    def attend(self, me: PeerWorker, apart: Iterable[str]) -> None:
        """Begin to ask whom we dial for ucx, but those apart: the scheduler and the nanny."""
        self.me = me
        self.apart = set(apart)
        self.contacts: dict[str, str | None] = {}
        self._asking: dict[str, asyncio.Lock] = {}

    async def _connect(self, addr: str, timeout: float | None = None) -> Comm:
        if addr in self.apart or not await self.me.may_use_ucx_to(addr):
            return await super()._connect(addr, timeout)
        contact = await self._contact(addr)
        while contact is not None:
            try:
                comm: Comm = await super()._connect(contact, UCX_DEADLINE_S)
            except OSError as error:
                contact = await self._after(contact, addr, error)
            else:
                del self.occupied[contact]
                self.occupied[addr].add(comm)
                return comm
        return await super()._connect(addr, timeout)

    async def _after(self, contact: str, addr: str, error: OSError) -> str | None:
        """Where else a worker listens on ucx, when it could not be reached there."""
        if self.contacts.get(addr) == contact:
            del self.contacts[addr]
        again = await self._contact(addr)
        if again != contact:  # it is another worker by now
            return again
        self.contacts[addr] = None
        logger.warning(
            "no ucx to %s: %s. Data that this worker fetches there comes over tcp, which is slower",
            addr,
            root_cause(error),
        )
        return None

    async def _contact(self, addr: str) -> str | None:
        """Where a worker listens on ucx; None if it does not."""
        async with self._asking.setdefault(addr, asyncio.Lock()):
            if addr not in self.contacts:
                comm = await super()._connect(addr, ASK_DEADLINE_S)
                try:
                    async with asyncio.timeout(ASK_DEADLINE_S):
                        # closed, or it would be taken for one that carries data
                        answer = await send_recv(
                            comm, op=CONTACT, asker=self.me.address, close=True
                        )
                finally:
                    self.reuse(addr, comm)
                if answer is None:
                    self.contacts[addr] = None
                else:
                    from . import ucx

                    ucx.known_secrets[answer["address"].partition("://")[2]] = answer["secret"]
                    self.contacts[addr] = answer["address"]
            return self.contacts[addr]

    def remove(self, addr: str, **kwargs: Any) -> None:
        """Forget a worker that is gone."""
        if contact := self.contacts.pop(addr, None):
            from . import ucx

            ucx.known_secrets.pop(contact.partition("://")[2], None)
        self._asking.pop(addr, None)
        super().remove(addr, **kwargs)


class PeerWorker(Worker):
    """A worker that may talk ucx to its peers, and gets warm before it is used.

    The exchange is ``ucx``, ``tcp``, or ``auto`` for ucx if it starts; its reach ``all`` workers,
    or those of its ``node``. ``tells``: it writes to stderr that it is warm.
    """

    def __init__(
        self,
        *args: Any,
        exchange: str = "tcp",
        on_device: bool = False,
        reach: str = "all",
        tells: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.exchange = exchange
        self.reach = reach
        self.on_device = on_device
        self.tells = tells
        self._ucx_address: str | None = None
        self._decided = asyncio.Event()
        self._warming: asyncio.Task[None] | None = None
        self._mappings: Mappings | None = None
        self._releasing: asyncio.Task[None] | None = None
        self.handlers |= {
            CONTACT: self._tell_contact,
            BLOCK: self._give_block,
            WARM: self._fetch,
            MAPPED: self._tell_mapped,
        }
        raise_descriptor_limit()
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
        return {addr: "ucx" if contact else "tcp" for addr, contact in pool.contacts.items()}

    async def may_use_ucx_to(self, address: str) -> bool:
        """Return whether to try ucx to a worker, once it is known whether ucx starts here."""
        await self._decided.wait()
        if self._ucx_address is None:
            return False
        return self.reach == "all" or get_address_host(address) == get_address_host(self.address)

    async def listen(self, *args: Any, **kwargs: Any) -> None:
        """Listen on tcp, and on ucx where that was asked for by name and has to work."""
        await super().listen(*args, **kwargs)
        if self.exchange == "ucx" and self._ucx_address is None:
            why = ""
            try:
                await self._listen_on_ucx()
            except Exception as error:
                why = root_cause(error)
            if why:  # with UCX's error as its context, distributed would write a traceback
                text = (
                    f"--protocol ucx: ucx does not start: {why}. See UCX_TLS, UCX_NET_DEVICES and "
                    f"hpcdask doctor"
                )
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
                await load_aside((UCX,))
                sending = asyncio.create_task(load_aside(SENDING if self.on_device else ()))
                if self.exchange == "auto":
                    await self._listen_on_ucx()
                await sending
                if self.on_device:
                    self._ask_for_more()
                    self._watch_mappings()
        except Exception as error:
            self.exchange = "tcp"
            logger.warning(
                "ucx does not start in worker %s, which exchanges data over tcp: %s: %s",
                self.name,
                type(error).__name__,
                error,
            )
        finally:
            mark("transport started")
            self._decided.set()

    def _ask_for_more(self) -> None:
        """Make the worker fetch more in one message, unless the user said how much."""
        limit = "distributed.worker.transfer.message-bytes-limit"
        if dask.config.get(limit) == dask.config.get(limit, config=defaults):
            upstream.set_message_limit(self, MESSAGE_NBYTES)

    def _watch_mappings(self) -> None:
        from . import ucx, ucx_progress

        self._mappings = Mappings(ucx.version())
        self._releasing = asyncio.create_task(
            release_of_the_dead(self._mappings, ucx_progress.progress().turn, str(self.name))
        )

    async def start_unsafe(self) -> Any:
        """Start, then get warm while the user's program starts."""
        result = await super().start_unsafe()
        mark("registered")
        self._warming = asyncio.create_task(self._warm())
        return result

    async def close(self, *args: Any, **kwargs: Any) -> Any:
        """Close."""
        for task in (self._warming, self._releasing):
            if task is not None:
                task.cancel()
        return await super().close(*args, **kwargs)

    async def _tell_contact(self, asker: str) -> dict[str, Any] | None:
        if not await self.may_use_ucx_to(asker):
            return None
        return {"address": self._ucx_address, "secret": self._ucx.secret}

    async def _tell_mapped(self) -> dict[str, Any]:
        """Return this process and those whose device memory it has mapped; None if unknown."""
        found = self._mappings if self._mappings is not None and self._mappings.known else None
        return {
            "me": [os.getpid(), own_namespace()],
            "mapped": found and [list(process) for process in found.processes()],
        }

    async def _give_block(self, count: int) -> Any:
        return to_serialize(_block(count, self.on_device))

    async def _fetch(self, source: str, name: str) -> dict[str, Any]:
        """Fetch from one peer for the first time, and again to see how fast it is."""
        host = get_address_host
        same = host(source) == host(self.address)
        link = LinkTest(to=str(self.name), source=name, same_host=same)
        try:
            async with asyncio.timeout(WARM_DEADLINE_S):
                first_s, _ = await self._time_block(source, FIRST_NBYTES)
                count = MEASURED_NBYTES if self.on_device else FIRST_NBYTES
                # the best of some: the event loop is held up while another link comes up
                timed = [await self._time_block(source, count) for _ in range(MEASUREMENTS)]
                cuda_ipc = await self._shares_memory_with(source) if same else None
        except Exception as error:
            return asdict(replace(link, problem=root_cause(error)))
        seconds, transport = min(timed)
        found: dict[str, Any] = {"transport": transport, "rate": count / seconds}
        return asdict(replace(link, first_s=first_s, cuda_ipc=cuda_ipc, **found))

    async def _shares_memory_with(self, source: str) -> bool | None:
        """Return whether UCX has mapped device memory of the other, here or there."""
        ours = await self._tell_mapped()
        theirs = await self._ask(source, op=MAPPED)
        if ours["mapped"] is None or theirs["mapped"] is None:
            return None
        # lists are tuples once they were sent
        mapped = {tuple(process) for process in (*ours["mapped"], *theirs["mapped"])}
        return tuple(theirs["me"]) in mapped or tuple(ours["me"]) in mapped

    async def _ask(self, peer: str, **message: Any) -> Any:
        comm = await self.rpc.connect(peer)
        try:
            return await send_recv(comm, **message)
        finally:
            self.rpc.reuse(peer, comm)

    async def _time_block(self, source: str, count: int) -> tuple[float, str]:
        start = time.perf_counter()
        comm = await self.rpc.connect(source)
        try:
            await send_recv(comm, op=BLOCK, count=count)
        finally:
            self.rpc.reuse(source, comm)
        scheme = comm.peer_address.partition("://")[0]
        return time.perf_counter() - start, "ucx" if scheme == "ucx" else "tcp"

    async def _warm(self) -> None:
        """Fetch from those that were there before, and have them fetch from here."""
        start = time.perf_counter()
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
        seconds = time.perf_counter() - start
        name, address = str(self.name), self.address
        self.log_event(TOPIC, {"worker": address, "name": name, "seconds": seconds, "links": links})
        if self.tells and links:
            found = evaluate([LinkTest(**link) for link in links], on_device=self.on_device)
            for line in (f"worker {name} is warm: {found.line}", *found.warnings):
                say(line)

    async def _exchange_blocks(self, links: list[dict[str, Any]]) -> None:
        known = (await self.scheduler.identity())["workers"]
        names = {address: str(info["name"]) for address, info in known.items()}
        for peer in choose_peers(
            self.address, [address for address in names if await self.may_use_ucx_to(address)]
        ):
            links.append(await self._fetch(peer, names[peer]))
            links.append(await self._have_fetched(peer, names[peer]))

    async def _have_fetched(self, peer: str, name: str) -> dict[str, Any]:
        """Return what a peer finds when it fetches from here."""
        try:
            async with asyncio.timeout(WARM_DEADLINE_S):
                me = {"source": self.address, "name": str(self.name)}
                return dict(await self._ask(peer, op=WARM, **me))
        except Exception as error:
            return asdict(LinkTest(to=name, source=str(self.name), problem=root_cause(error)))


async def load_aside(modules: Iterable[str]) -> None:
    """Import in a thread what was not."""
    if missing := [name for name in modules if name not in sys.modules]:
        await asyncio.to_thread(load, missing)


def load(modules: Iterable[str]) -> None:
    """Import what is there of these, for whoever imports it later."""
    for name in modules:
        with contextlib.suppress(ImportError):  # whoever needs it says so
            importlib.import_module(name)


def _block(count: int, on_device: bool) -> Any:
    return importlib.import_module("cupy" if on_device else "numpy").zeros(count, dtype="uint8")
