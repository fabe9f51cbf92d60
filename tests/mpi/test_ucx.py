"""Workers that exchange data over ucx: real processes, UCX over shared memory and tcp."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import pytest

from clock import PATIENCE
from launching import clean_environment, needs, wait_for
from running import Site

pytestmark = [pytest.mark.mpi, needs("distributed_ucxx")]

PUPPET = """
import asyncio, faulthandler, json, logging, signal, sys, textwrap, traceback, types

faulthandler.register(signal.SIGUSR1, all_threads=True)

async def main():
    me = types.SimpleNamespace(log=[])
    space = {"me": me, "asyncio": asyncio}
    handler = logging.Handler()
    handler.emit = lambda record: me.log.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    logging.getLogger("distributed.hpcdask.ucx").setLevel("INFO")
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: me.log.append("loop: " + str(context)))
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        try:
            source = textwrap.indent(json.loads(line), "    ")
            exec("async def step():\\n" + source, space)
            answer = json.dumps({"value": await space["step"]()})
        except BaseException as error:
            answer = json.dumps({"error": "".join(traceback.format_exception(error))})
        print("@" + answer, flush=True)

asyncio.run(main())
"""

PRELUDE = """global dask, ucx, connect, listen, np, os, time, base, upstream
global to_serialize, mock, psutil, gc
import dask, gc, os, psutil, time
from unittest import mock
import numpy as np
from distributed.comm import connect, listen
from distributed.protocol import to_serialize
import distributed_ucxx.ucxx as base
from hpcdask.comm import ucx
from hpcdask.upstream import ucxx as upstream
ucx.register()
ucx.progress()
"""

LISTEN = """
global unproven
def unproven():
    return [task for task in asyncio.all_tasks() if "accept" in repr(task)]
me.comms, me.listener = [], None
async def echo(comm):
    me.comms.append(comm)
    try:
        while True:
            message = await comm.read()
            if "frames" in message:
                message["frames"] = [to_serialize(frame) for frame in message["frames"]]
            await comm.write(message)
    except OSError:
        pass
me.listener = listen("ucx://127.0.0.1:0", echo)
await me.listener.start()
return [me.listener.contact_address.removeprefix("ucx://"), me.listener.secret.hex()]
"""

#: Sends and gets back one message.
GREET = """
comm = await connect("ucx://" + me.address, timeout=60)
await comm.write({"x": 1})
answer = await comm.read()
await comm.close()
return answer
"""


class Puppet:
    """A process with an event loop that does what the test tells it."""

    def __init__(self, *prelude: str) -> None:
        env = {**clean_environment(), "UCXPY_PROGRESS_MODE": "blocking"}
        env["UCX_WARN_UNUSED_ENV_VARS"] = "n"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", PUPPET], env=env, **pipes)
        self.answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()
        self.prelude = prelude
        for part in prelude:
            self.begin(part)

    def read(self) -> None:
        for line in self.process.stdout:
            if line.startswith("@"):
                self.answers.put(line[1:])

    def ready(self) -> Puppet:
        """Wait for the prelude."""
        for _ in self.prelude:
            self.value = self.result(30)
        return self

    def begin(self, source: str) -> None:
        """Have it run the body of an async function."""
        self.process.stdin.write(json.dumps(textwrap.dedent(source)) + "\n")
        self.process.stdin.flush()

    def result(self, timeout: float = 15):
        """Of the oldest unanswered `begin`."""
        try:
            answer = json.loads(self.answers.get(timeout=PATIENCE * timeout))
        except queue.Empty:
            os.kill(self.process.pid, signal.SIGUSR1)  # prints where it is, to stderr
            pytest.fail(f"no answer within {PATIENCE * timeout:g} s")
        if "error" in answer:
            pytest.fail(answer["error"])
        return answer["value"]

    def do(self, source: str, timeout: float = 15):
        """Run the body of an async function and return what it returns."""
        self.begin(source)
        return self.result(timeout)

    def wait_for(self, expression: str, timeout: float = 10) -> None:
        """Wait until an expression is true there."""
        wait_for(lambda: self.do(f"return bool({expression})"), timeout, expression, 0.02)

    def logged(self) -> list[str]:
        """What it logged since the last call."""
        return self.do("log, me.log[:] = list(me.log), []\nreturn log")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                stream.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Puppet, Puppet]]:
    """A listener that echoes, and another process that knows its secret."""
    there, here = Puppet(PRELUDE, LISTEN), Puppet(PRELUDE)
    try:
        address, secret = there.ready().value
        here.ready()
        here.do(f"me.address, me.secret = {address!r}, bytes.fromhex({secret!r})")
        here.do("me.ip, port = me.address.split(':')\nme.port = int(port)")
        yield there, here
    finally:
        there.close()
        here.close()


@pytest.fixture
def there(pair: tuple[Puppet, Puppet]) -> Iterator[Puppet]:
    """The listener; at the end of the test nothing may be left of its connections."""
    there = pair[0]
    there.do("me.log.clear()")
    yield there
    there.do(
        """
        mock.patch.stopall()
        dask.config.set({"distributed.comm.timeouts.connect": "30s"})
        for comm in me.comms:
            comm.abort()
        comm = None
        me.comms.clear()
        """
    )
    there.wait_for("not unproven() and not gc.collect() * 0")


@pytest.fixture
def here(pair: tuple[Puppet, Puppet], there: Puppet) -> Iterator[Puppet]:
    """The other process, which knows the secret."""
    here = pair[1]
    here.do("ucx.known_secrets['ucx://' + me.address] = me.secret\nme.log.clear()")
    yield here
    here.do("mock.patch.stopall()")


# Who is let in


def test_who_does_not_know_it_is_refused_at_once_and_does_not_try_again(there, here):
    text = here.do(
        """
        ucx.known_secrets["ucx://" + me.address] = b"x" * 32
        try:
            await connect("ucx://" + me.address, timeout=60)
        except OSError as error:
            return repr(error)
        """
    )
    assert text.startswith("FatalCommClosedError(")
    assert "did not prove itself" in text
    (line,) = there.logged()
    assert line.startswith("refused a ucx connection to ucx://127.0.0.1:")
    assert "does not know the secret" in line


def test_silent_strangers_are_refused_in_the_user_s_time_and_leave_nothing_behind(there, here):
    """Regression: a deadline of 5 s refused workers that were busy, whatever the user had set."""
    there.do("dask.config.set({'distributed.comm.timeouts.connect': '100ms'})")
    here.do("me.silent = [upstream.connect(me.ip, me.port) for _ in range(10)]")
    refused = "it did not prove itself within 0.1 s"
    there.wait_for(f"sum({refused!r} in line for line in me.log) == 10")
    here.do("[one.close_blocking() for one in me.silent]; me.silent = None")
    there.wait_for("not unproven()")


# Messages

OPEN = 'me.comm = await connect("ucx://" + me.address, timeout=60)\n'
#: Neither polls nor looks from time to time: a lost wake-up is a hang.
ASLEEP = """
mock.patch.object(ucx, "SAFETY_S", 60).start()
for name in ("ANSWER_POLL_S", "POLL_S"):
    mock.patch.object(ucx, name, 0.0).start()
await asyncio.sleep(0.2)  # the last look from before
"""


def test_an_idle_connection_costs_no_processor_time(there: Puppet, here: Puppet):
    here.do(OPEN + "await me.comm.write({'x': 1})\nreturn await me.comm.read()")
    share = """
    cpu = lambda: sum(psutil.Process().cpu_times()[:2])
    used, start = cpu(), time.monotonic()
    await asyncio.sleep(0.5)
    return (cpu() - used) / (time.monotonic() - start)
    """
    for puppet in (there, here):
        wait_for(lambda puppet=puppet: puppet.do(share) < 0.1, what="an idle process")
    here.do("await me.comm.close()")


@pytest.mark.parametrize("asleep", [True, False], ids=["by UCX's report", "by polling"])
def test_messages_of_all_sizes_arrive_both_ways_at_once(there: Puppet, here: Puppet, asleep: bool):
    if asleep:
        there.do(ASLEEP)
        here.do(ASLEEP)
    here.do(
        """
        rng = np.random.default_rng(1)
        edges = [ucx.INLINE_NBYTES, ucx.BLOCK_NBYTES, 1, 8192, 65536]
        sizes = [0, 1, 10**7, *(edge + d for edge in edges for d in (-1, 0, 1))]

        def message(number):
            count = [1, 3, 100][number % 3]
            some = rng.choice(sizes[:-1] if count < 100 else sizes[3:], count)
            if sum(some) > 2 * 10**7:
                some = some[:1]
            frames = [rng.integers(0, 256, size, dtype="u1") for size in some]
            return {"number": number, "text": "x" * number * 50, "frames": frames}

        async def talk(which):
            comm = await connect("ucx://" + me.address, timeout=60)
            sent = [message(n) for n in range(which, 36, 3)]
            async def write():
                for one in sent:
                    await comm.write({**one, "frames": [to_serialize(f) for f in one["frames"]]})
            writing = asyncio.create_task(write())
            for one in sent:
                back = await comm.read()
                assert (back["number"], back["text"]) == (one["number"], one["text"])
                assert len(back["frames"]) == len(one["frames"])
                for got, frame in zip(back["frames"], one["frames"]):
                    assert np.array_equal(got, frame), (one["number"], len(frame))
                    assert got.flags.writeable
            await writing
            await comm.close()

        await asyncio.gather(*(talk(which) for which in range(3)))
        """,
        40,
    )
    assert there.logged() == []


#: Names the OSError that ends each.
ENDED = """
async def ended(work):
    try:
        async with asyncio.timeout(60):
            await work
    except OSError as error:
        return type(error).__name__
"""


def test_whoever_waits_for_a_peer_that_is_killed_hears_of_it(there: Puppet, here: Puppet):
    mortal = Puppet(PRELUDE, LISTEN)
    try:
        address, secret = mortal.ready().value
        mortal.do("me.listener.comm_handler = lambda comm: asyncio.sleep(100)")
        here.do(
            f"""
            ucx.known_secrets["ucx://" + {address!r}] = bytes.fromhex({secret!r})
            me.reader = await connect("ucx://{address}", timeout=60)
            me.writer = await connect("ucx://{address}", timeout=60)
            {ENDED.replace(chr(10), chr(10) + " " * 12)}
            async def write():
                while True:
                    await me.writer.write({{"x": to_serialize(np.zeros(10**7))}})
            me.ends = [asyncio.create_task(ended(work)) for work in (me.reader.read(), write())]
            await asyncio.sleep(0.1)
            """
        )
        os.kill(mortal.process.pid, signal.SIGKILL)
        ends = here.do("return [await end for end in me.ends]")
        assert ends == ["CommClosedError"] * 2
    finally:
        mortal.close()
    text = here.do(
        f"""
        try:
            await connect("ucx://{address}", timeout=1)
        except OSError as error:
            return str(error)
        """
    )
    assert "Timed out" in text
    assert here.do(GREET) == {"x": 1}  # what broke has no effect on others


def test_a_peer_that_stands_still_holds_up_nobody_else(there: Puppet, here: Puppet):
    still = Puppet(PRELUDE, LISTEN)
    try:
        address, secret = still.ready().value
        here.do(
            f"""
            ucx.known_secrets["ucx://" + {address!r}] = bytes.fromhex({secret!r})
            me.comms = [await connect("ucx://{address}", timeout=60) for _ in range(3)]
            """
        )
        os.kill(still.process.pid, signal.SIGSTOP)
        here.do(
            """
            big = {"x": to_serialize(np.zeros(10**7))}
            me.tasks = [
                asyncio.create_task(me.comms[0].write(big)),
                asyncio.create_task(me.comms[1].read()),
                asyncio.create_task(me.comms[2].write(big)),
            ]
            await asyncio.sleep(0.05)
            """
        )
        assert here.do(GREET) == {"x": 1}
        ends = here.do(
            """
            me.tasks[0].cancel(), me.tasks[1].cancel()
            await me.comms[2].close()
            ends = await asyncio.gather(*me.tasks, return_exceptions=True)
            return [type(end).__name__ for end in ends]
            """
        )
        assert ends == ["CancelledError", "CancelledError", "CommClosedError"]
        assert here.do("return [comm.closed() for comm in me.comms]") == [True] * 3
    finally:
        os.kill(still.process.pid, signal.SIGCONT)
        still.close()
    assert here.do(GREET) == {"x": 1}


def test_a_message_sent_right_before_the_end_is_still_read(there: Puppet, here: Puppet):
    there.do(
        """
        async def once(comm):
            await comm.read()
            await comm.write({"x": 1, "frame": to_serialize(np.arange(100))})
            await comm.close()
        me.echo, me.listener.comm_handler = me.listener.comm_handler, once
        """
    )
    try:
        assert here.do(
            OPEN + "await me.comm.write({})\n"
            "time.sleep(0.2)  # the event loop is busy meanwhile\n"
            "ucx.progress().turn()\n"
            "return (await me.comm.read())['x']"
        )
    finally:
        there.do("me.listener.comm_handler = me.echo")


# Workers

SCHEDULE = """
from distributed import Client, Scheduler
me.scheduler = await Scheduler(host="127.0.0.1", port=0, dashboard_address=":0")
me.client = await Client(me.scheduler.address, asynchronous=True)
return me.scheduler.address
"""
WORK = """
global PeerWorker, peers, send_recv
from distributed.core import send_recv
from hpcdask.comm import peers
from hpcdask.comm.peers import PeerWorker
peers.FIRST_NBYTES = peers.MEASURED_NBYTES = 2**16
peers.WARM_DEADLINE_S = 20
peers.PAUSE_S = 0.2
async def start(exchange="ucx", **kwargs):
    return await PeerWorker(
        SCHEDULER, exchange=exchange, host="127.0.0.1", nthreads=1, dashboard=False, **kwargs
    )
async def fetch(address):
    comm = await me.worker.rpc.connect(address)
    try:
        await send_recv(comm, op=peers.BLOCK, count=1000)
    finally:
        me.worker.rpc.reuse(address, comm)
    return comm.peer_address.partition("://")[0]
space = globals()
me.start, me.fetch = start, fetch
me.worker = await start(name=NAME)
return me.worker.address
"""


def work(scheduler: str, name: str) -> str:
    return WORK.replace("SCHEDULER", repr(scheduler)).replace("NAME", repr(name))


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[Puppet, Puppet, Puppet]]:
    """A scheduler with a client, and two workers that came at the same time and are warm."""
    puppets = [Puppet(PRELUDE.replace("ucx.register()\nucx.progress()", ""), SCHEDULE)]
    puppets += [Puppet(PRELUDE), Puppet(PRELUDE)]
    try:
        address = puppets[0].ready().value
        for name, puppet in zip("ab", puppets[1:], strict=True):
            puppet.ready().do(f"me.scheduler = {address!r}")
            puppet.begin(work(address, name))
        for puppet in puppets[1:]:
            puppet.address = puppet.result(30)
        for name in "ab":
            warm(puppets[0], name)
        yield tuple(puppets)
        for puppet in puppets:
            noise = [line for line in puppet.logged() if line.startswith("loop: ")]
            assert not noise
    finally:
        for puppet in puppets:
            puppet.close()


def warm(scheduler: Puppet, name: str) -> dict:
    """What a worker found when it got warm."""
    events = "[e for _, e in me.scheduler.get_events('hpcdask-warm') if e['name'] == NAME]"
    events = events.replace("NAME", repr(name))
    scheduler.wait_for(events, 15)
    (event,) = scheduler.do(f"return {events}")
    return event


def test_workers_that_come_together_get_warm_and_say_so(cluster):
    scheduler, a, b = cluster
    links = [link for name in "ab" for link in warm(scheduler, name)["links"]]
    assert {(link["to"], link["source"]) for link in links} == {("a", "b"), ("b", "a")}
    assert {link["transport"] for link in links} == {"ucx"}
    assert not [link for link in links if link["problem"]]
    assert a.do("return me.worker.peer_transports") == {b.address: "ucx"}


def test_a_worker_of_plain_distributed_is_served_over_tcp(cluster):
    _scheduler, a, b = cluster
    plain = b.do(
        """
        from distributed import Worker
        me.plain = await Worker(
            me.scheduler, host="127.0.0.1", nthreads=1, name="plain", dashboard=False
        )
        return me.plain.address
        """
    )
    assert a.do(
        f"""
        comm = await me.worker.rpc.connect({plain!r})
        answer = await send_recv(comm, op="identity")
        me.worker.rpc.reuse({plain!r}, comm)
        return [answer["type"], comm.peer_address, me.worker.peer_transports[{plain!r}]]
        """
    ) == ["Worker", plain, "tcp"]
    b.do("await me.plain.close()")
    wait_for(lambda: plain not in a.do("return me.worker.peer_transports"), 5)


def forget(puppet: Puppet, address: str) -> None:
    """Have a worker know nothing of another one."""
    puppet.logged()
    puppet.do(f"me.worker.rpc.remove({address!r})\nawait asyncio.sleep(0.05)")


@contextlib.contextmanager
def deceived(a: Puppet, b: Puppet) -> Iterator[None]:
    """Have the second tell a secret that it does not let in."""
    forget(a, b.address)
    b.do(
        """
        me.tell = me.worker.handlers[peers.CONTACT]
        async def lie(asker):
            return {**await me.tell(asker), "secret": b"z" * 32}
        me.worker.handlers[peers.CONTACT] = lie
        """
    )
    try:
        yield
    finally:
        b.do("me.worker.handlers[peers.CONTACT] = me.tell")


def test_a_later_transfer_tries_ucx_again_where_the_first_contact_failed(cluster):
    """Regression: one failure sent a pair of workers over tcp for the rest of the run."""
    _, a, b = cluster
    fetch = f"return await me.fetch({b.address!r})"
    with deceived(a, b):
        assert a.do(fetch) == "tcp"
        assert a.do(fetch) == "tcp"
        assert a.do("return me.worker.peer_transports")[b.address] == "tcp"
    wait_for(lambda: a.do(fetch) == "ucx", 10, "ucx again")
    assert a.do("return me.worker.peer_transports")[b.address] == "ucx"
    assert not [line for line in a.logged() if line.startswith("no ucx to ")]


# A whole run


PROGRAM = """
import time
import dask.array as da
import numpy as np
from distributed import Client, wait


def transports(dask_worker):
    return sorted(dask_worker.peer_transports.values())


def warm(dask_worker):
    return dask_worker.is_warm


def add():
    x = da.from_array(np.arange(10**6).reshape(1000, 1000), chunks=250).persist()
    assert int((x + x.T).sum().compute()) == 10**6 * (10**6 - 1)


def hooked():  # by UCX, before the worker was forked
    import os
    return ["libucs.so" in open(f"/proc/{pid}/maps").read() for pid in (os.getpid(), os.getppid())]


def wait_until_warm():
    deadline = time.monotonic() + 120
    while not all(client.run(warm).values()) and time.monotonic() < deadline:
        time.sleep(0.05)


client = Client()
wait_until_warm()
add()
print("hooked", *client.run(hooked).values())
print("before", *client.run(transports).values(), flush=True)
client.restart()
client.wait_for_workers(2)
wait_until_warm()
add()
(y,) = client.scatter([np.ones(10**6)], broadcast=True)
assert client.submit(np.sum, y).result() == client.gather(y).sum() == 10**6
print("after", *client.run(transports).values(), flush=True)
"""


def test_a_run_under_mpirun_exchanges_over_ucx_and_ends_in_silence(site: Site):
    ended = site.run("--protocol", "ucx", program=PROGRAM)
    hooks, *transports = ended.out.splitlines()
    assert hooks == "hooked [True, True] [True, True]"
    assert transports == ["before ['ucx'] ['ucx']", "after ['ucx'] ['ucx']"]
    assert not ended.foreign_lines, str(ended)
    assert "is replaced" not in ended.err  # the program asked for it
    assert "ucx between 1 pair of workers (" in ended.err
    assert "goes over tcp" not in ended.err


def test_ucx_that_does_not_start_is_told_in_a_line(site: Site):
    env = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "~none"}  # a pattern that it does not know
    ended = site.run("--protocol", "ucx", program=PROGRAM, env=env, code=1)
    assert "--protocol ucx: ucx does not start: UCXXNoDeviceError" in ended.err
    assert "Traceback" not in ended.err
