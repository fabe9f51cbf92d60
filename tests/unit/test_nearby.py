"""Processes of one user on one host talk over Unix sockets; nobody else gets there."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import dask
import numpy as np
import psutil
import pytest
from distributed import Client, Scheduler, Security, Worker
from distributed.comm import Comm, CommClosedError, connect
from distributed.core import Server
from distributed.protocol import to_serialize
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
from distributed.protocol.serialize import dask_deserialize, dask_serialize

from hpcdask.security import nearby, process_memory
from hpcdask.security.credentials import create_credentials, save_credentials, to_security
from launching import wait_for
from strangers import UID, as_stranger, root_only


@pytest.fixture(scope="module")
def access() -> Security:
    return to_security(create_credentials())


@contextlib.asynccontextmanager
async def serving(access: Security) -> AsyncIterator[Server]:
    server = Server({"ping": lambda: "pong"})
    await server.listen("tls://127.0.0.1:0", **access.get_listen_args("worker"))
    try:
        yield server
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def dialled(address: str, access: Security, **options: Any) -> AsyncIterator[Comm]:
    comm = await connect(address, **access.get_connection_args("client"), **options)
    try:
        await comm.write({"op": "ping", "reply": True})
        assert await comm.read() == "pong"
        yield comm
    finally:
        await comm.close()


def is_encrypted(comm: Comm) -> bool:
    return "cipher" in comm.extra_info


def socket_of(comm: Comm) -> bytes:
    return comm.stream.socket.getpeername()


def is_bound(name: bytes) -> bool:
    return name.replace(b"\0", b"@") in Path("/proc/net/unix").read_bytes()


@contextlib.asynccontextmanager
async def known_socket(access: Security) -> AsyncIterator[tuple[Server, bytes]]:
    """A server, and the name of its Unix socket."""
    async with serving(access) as server, dialled(server.address, access) as comm:
        yield server, socket_of(comm)


async def test_a_connection_on_one_host_is_a_unix_socket_that_is_gone_at_the_end(access):
    async with serving(access) as server, dialled(server.address, access) as comm:
        assert not is_encrypted(comm)
        assert comm.same_host
        name = socket_of(comm)
        assert is_bound(name)
    assert not is_bound(name)


async def test_arrays_between_workers_and_a_client_arrive(access):
    ends = {"host": "127.0.0.1", "security": access, "dashboard": False}
    async with Scheduler(protocol="tls", port=0, dashboard_address=":0", **ends) as scheduler:
        workers = [Worker(scheduler.address, name=name, **ends) for name in "ab"]
        made = Client(scheduler.address, security=access, asynchronous=True)
        async with workers[0], workers[1], made as client:
            x = np.random.default_rng().random(2_000_000)
            there = await client.scatter(x, workers=["a"], direct=True)
            found = client.submit(np.negative, there, workers=["b"])
            assert (await client.gather(found, direct=True) == -x).all()


@contextlib.asynccontextmanager
async def exchanging(access: Security) -> AsyncIterator[tuple[Comm, Comm]]:
    """Both ends of a connection."""
    server, taken = Server({}), asyncio.Queue()

    async def take(comm: Comm, n: int) -> None:
        await taken.put(comm)
        await gone.wait()

    server.handlers["take"], gone = take, asyncio.Event()
    await server.listen("tls://127.0.0.1:0", **access.get_listen_args("worker"))
    comm = await connect(server.address, **access.get_connection_args("client"))
    await comm.write({"op": "take", "n": 0})
    try:
        yield comm, await taken.get()
    finally:
        gone.set()
        comm.abort()
        await server.close()


def rss() -> int:
    return psutil.Process().memory_info().rss


def copies(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> list[int]:
    """Bytes of each buffer that is copied from another process; calls `before` with them."""
    sizes, real = [], nearby.read_memory

    def read(pid: int, address: int, size: int) -> memoryview:
        before(size)
        sizes.append(size)
        return real(pid, address, size)

    monkeypatch.setattr(nearby, "read_memory", read)
    return sizes


ARRAYS = {n: np.arange(n, dtype="u1") for n in (0, 1, 3000, 200_000, 50_000_000)}


def is_whole(message: dict[str, Any]) -> bool:
    arrays = {n: np.asarray(message[str(n)]) for n in ARRAYS}
    for array in arrays.values():
        array[:] += 0  # theirs to write to
    return all((arrays[n] == ARRAYS[n]).all() for n in ARRAYS)


@pytest.mark.parametrize("forbidden", ["", "before", "later"])
async def test_large_arrays_are_copied_where_the_kernel_allows_it(access, monkeypatch, forbidden):
    """It may not in a container, nor of memory that a device driver has mapped."""
    sizes = copies(monkeypatch, lambda size: None)
    forbid = partial(monkeypatch.setattr, process_memory.LIBC, "process_vm_readv", lambda *args: -1)
    if forbidden == "before":
        forbid()
    async with exchanging(access) as (here, there):
        if forbidden == "later":
            forbid()
        for one, other in ((here, there), (there, here)):
            for _ in range(3):
                await one.write({str(n): to_serialize(array) for n, array in ARRAYS.items()})
                assert is_whole(await other.read())
            await other.write("to be read")
            assert await one.read() == "to be read"
    assert sizes == ([] if forbidden else [200_000, 50_000_000] * 6)


class OnDevice:
    """Stand-in for an array on a device."""

    __cuda_array_interface__: Any = None

    def __init__(self, content: bytes) -> None:
        self.content, self.nbytes = content, len(content)


cuda_serialize.register(OnDevice)(lambda array: ({}, [array]))
cuda_deserialize.register(OnDevice)(lambda header, frames: frames[0])
dask_serialize.register(OnDevice)(lambda array: ({}, [array.content]))
dask_deserialize.register(OnDevice)(lambda header, frames: OnDevice(bytes(frames[0])))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Memory that is lent, by handle, and the bytes that were copied; ``full`` lends none."""
    found: dict[str, Any] = {"full": False, "lent": {}, "copied": []}

    def lend(arrays: list[OnDevice]) -> tuple[bytes, object]:
        if found["full"]:
            raise MemoryError
        handle = os.urandom(64)
        found["lent"][handle] = b"".join(array.content for array in arrays)
        return handle, object()

    def copy(handle: bytes, sizes: list[int]) -> list[OnDevice]:
        if (memory := found["lent"].get(handle)) is None:
            raise OSError("no such memory")
        found["copied"] += sizes
        ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
        return [OnDevice(memory[end - size : end]) for end, size in zip(ends, sizes, strict=True)]

    monkeypatch.setattr(process_memory, "_taken", True)
    monkeypatch.setattr(process_memory, "lend_arrays", lend)
    monkeypatch.setattr(process_memory, "copy_arrays", copy)
    return found


DEVICE_SIZES = (0, 1, 100_000)


@pytest.mark.parametrize("full", [False, True])
async def test_arrays_on_a_device_are_lent_beside_those_of_the_host(access, device, full):
    """Those of a device that has no room for a copy go through the host's memory."""
    device["full"] = full
    arrays = {f"device {n}": to_serialize(OnDevice(os.urandom(n))) for n in DEVICE_SIZES}
    arrays |= {str(n): to_serialize(array) for n, array in ARRAYS.items()}
    async with exchanging(access) as (here, there):
        for one, other in ((here, there), (there, here)):
            await one.write(arrays)
            message = await other.read()
            assert is_whole(message)
            for n in DEVICE_SIZES:
                name = f"device {n}"
                assert message[name].content == arrays[name].data.content
    assert device["copied"] == ([] if full else [*DEVICE_SIZES] * 2)


async def test_device_memory_that_cannot_be_opened_is_a_lost_connection(access, device):
    """Whoever gathers asks the scheduler then."""
    async with exchanging(access) as (here, there):
        await there.write({"array": to_serialize(OnDevice(b"all"))})
        device["lent"].clear()
        with pytest.raises(CommClosedError, match="no such memory"):
            await here.read()


async def test_what_is_sent_just_before_the_end_arrives(access):
    async with exchanging(access) as (here, there):
        await there.write({str(n): to_serialize(array) for n, array in ARRAYS.items()})
        closing = asyncio.ensure_future(there.close())
        assert is_whole(await here.read())
        async with asyncio.timeout(nearby.CLOSE_S - 1):
            await closing
        assert there.closed()


async def test_memory_of_a_copy_is_used_again_once_nobody_has_it(access, monkeypatch):
    """To zero new memory takes as long as the copy; what is spare is bounded, and goes."""
    async with exchanging(access) as (here, there):

        async def received(value: int, size: int = 3_000_000) -> Any:
            await there.write({"array": to_serialize(np.full(size, value, "u1"))})
            array = (await here.read())["array"]
            await here.write("copied")
            assert await there.read() == "copied"  # and lends no more
            return array

        first, second = await received(1), await received(2)
        half, place = first[:10], second.ctypes.data
        del first, second
        third = await received(3)
        assert third.ctypes.data == place
        assert ((half == 1).all(), (third == 3).all()) == (True, True)

        process_memory._spare.clear()
        gc.collect()
        before, large = rss(), 180_000_000
        monkeypatch.setattr(process_memory, "SPARE_S", 2.0)
        arrays = [await received(4, large), await received(5, large)]
        assert rss() > before + 1.9 * large
        arrays.clear()
        assert rss() < before + 1.5 * large
        wait_for(lambda: rss() < before + large // 2, 30, "the spare memory to go")


async def test_a_copy_of_what_may_be_gone_is_not_used(access, monkeypatch):
    """The sender's connection ends before the receiver has its copy."""
    async with exchanging(access) as (here, there):
        loop = asyncio.get_running_loop()

        async def end() -> None:
            there.abort()

        copies(monkeypatch, lambda size: asyncio.run_coroutine_threadsafe(end(), loop).result(30))
        await there.write({"array": to_serialize(ARRAYS[200_000])})
        with pytest.raises(CommClosedError):
            await here.read()
        assert here.closed()


async def test_a_server_that_ends_amid_a_copy_has_no_error_to_log(access, monkeypatch):
    """Regression: it closes its connections, then cancels who reads: distributed logs that."""
    async with exchanging(access) as (here, there):
        loop = asyncio.get_running_loop()

        async def end() -> None:
            await there.close()
            reading.cancel()

        copies(monkeypatch, lambda size: asyncio.run_coroutine_threadsafe(end(), loop).result(30))
        reading = asyncio.create_task(there.read())
        await here.write({"array": ARRAYS[200_000]})
        with pytest.raises(CommClosedError):
            await reading


async def test_a_sender_that_is_killed_is_a_lost_connection(process, monkeypatch):
    server, address, access = process

    def kill(size: int) -> None:
        server.kill()
        server.wait()

    copies(monkeypatch, kill)
    async with dialled(address, access) as comm:
        await comm.write({"op": "array", "reply": True})
        with pytest.raises(CommClosedError):
            await comm.read()


async def test_who_connects_and_says_nothing_is_let_go(access):
    with dask.config.set({"distributed.comm.timeouts.connect": "0.1s"}):
        async with known_socket(access) as (_, name):
            with socket.socket(socket.AF_UNIX) as silent:
                silent.connect(name)
                silent.setblocking(False)
                loop = asyncio.get_running_loop()
                while await loop.sock_recv(silent, 100):
                    pass


async def test_keys_of_the_user_s_own_use_tls():
    """distributed's own classes know nothing else."""
    own = Security.temporary()
    async with serving(own) as server, dialled(server.address, own) as comm:
        assert is_encrypted(comm)


async def test_another_cluster_s_keys_lead_nowhere(access):
    async with serving(to_security(create_credentials())) as server:
        with pytest.raises(OSError, match=r"(?i)certificate|closed|handshake|ssl"):
            async with dialled(server.address, access, timeout=3):
                pass


@root_only
async def test_another_user_of_the_host_is_kept_out(access):
    """By what the kernel says of the other end."""
    async with known_socket(access) as (server, name):

        def intrude() -> None:
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(name)
                stranger.settimeout(30)
                with contextlib.suppress(ConnectionError):
                    assert stranger.recv(100) == b""

        await asyncio.to_thread(as_stranger, intrude)
        async with dialled(server.address, access) as comm:
            assert not is_encrypted(comm)


async def test_a_connection_that_outlives_its_listener_ends_without_a_word(access, caplog):
    async with known_socket(access) as (server, name):
        with socket.socket(socket.AF_UNIX) as late:
            late.connect(name)
            late.setblocking(False)
            loop = asyncio.get_running_loop()
            assert await loop.sock_recv(late, 100)
            server.stop()
            for listener in server.listeners:
                listener.stop()
            server.listeners.clear()
    for _ in range(3):
        await asyncio.sleep(0)
    assert [one for one in caplog.records if one.exc_info] == []


@root_only
async def test_another_user_s_socket_is_not_believed(access):
    """Its listener has the user's id of the moment at which it began to listen."""
    async with known_socket(access) as (server, name):
        address = server.address
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(name)
        os.seteuid(UID)
        try:
            foreign.listen()
        finally:
            os.seteuid(0)
        again = Server({"ping": lambda: "pong"})
        await again.listen(address, **access.get_listen_args("worker"))
        async with again, dialled(address, access) as comm:
            assert is_encrypted(comm)


SERVER = """
import asyncio, sys
import numpy as np
from distributed.core import Server
from distributed.protocol import to_serialize
from hpcdask.security import nearby, process_memory
from hpcdask.security.credentials import load_credentials, to_security

async def serve():
    array = lambda: {"array": to_serialize(np.ones(10**6))}
    server = Server({"ping": lambda: "pong", "array": array})
    access = to_security(load_credentials(sys.argv[1]))
    await server.listen("tls://127.0.0.1:0", **access.get_listen_args("worker"))
    print(server.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str, Security]]:
    """A server in a process of its own, its address and its keys."""
    save_credentials(credentials := create_credentials(), str(tmp_path / "keys"))
    command = [sys.executable, "-c", SERVER, str(tmp_path / "keys")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield server, server.stdout.readline().strip(), to_security(credentials)
        finally:
            server.kill()


async def test_a_killed_process_leaves_no_socket(process):
    server, address, access = process
    async with dialled(address, access) as comm:
        name = socket_of(comm)
    server.kill()
    server.wait()
    assert not is_bound(name)  # its port may be another's already


async def test_a_process_that_hangs_is_waited_for_as_long_as_was_asked(process):
    server, address, access = process
    server.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{server.pid}/stat")
    wait_for(lambda: stat.read_text().split()[2] == "T", 10, "the process to stop")
    async with asyncio.timeout(60):
        with pytest.raises(OSError, match="Timed out"):
            async with dialled(address, access, timeout=1):
                pass
