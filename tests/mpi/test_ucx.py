"""Workers that exchange data over ucx: real processes, UCX over shared memory and tcp."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clock import PATIENCE, clock
from hpcdask.comm import fabric
from launching import clean_environment, needs, wait_for
from running import Site

pytestmark = [pytest.mark.mpi, needs("distributed_ucxx")]

PUPPET = """
import asyncio, faulthandler, json, logging, signal, sys, textwrap, traceback, types

faulthandler.register(signal.SIGUSR1, all_threads=True)

async def main():
    me = types.SimpleNamespace(log=[], levels=[])
    space = {"me": me, "asyncio": asyncio}
    handler = logging.Handler()
    def emit(record):
        me.log.append(record.getMessage())
        me.levels.append(record.levelname)
    handler.emit = emit
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

PRELUDE = """global clock, dask, ucx, connect, listen, np, os, time, base, Comm
global to_serialize, mock, psutil, gc
import dask, gc, os, psutil, time
from unittest import mock
import numpy as np
from clock import clock
from distributed.comm import Comm, connect, listen
from distributed.protocol import to_serialize
import distributed_ucxx.ucxx as base
from hpcdask.comm import ucx
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
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        env = {**clean_environment(), "UCXPY_PROGRESS_MODE": "blocking"}
        env["UCX_WARN_UNUSED_ENV_VARS"] = "n"
        env["PYTHONPATH"] = str(Path(__file__).parents[1])  # for its clock
        self.process = subprocess.Popen(
            [sys.executable, "-c", PUPPET],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=env,
            text=True,
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._prelude = prelude
        for part in prelude:
            self.begin(part)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                self._answers.put(line[1:])

    def ready(self) -> Puppet:
        """Wait for the prelude."""
        for _ in self._prelude:
            self.value = self.result(30)
        return self

    def begin(self, source: str) -> None:
        """Have it run the body of an async function."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(textwrap.dedent(source)) + "\n")
        self.process.stdin.flush()

    def result(self, timeout: float = 15):
        """Of the oldest unanswered `begin`."""
        try:
            answer = json.loads(self._answers.get(timeout=PATIENCE * timeout))
        except queue.Empty:
            os.kill(self.process.pid, signal.SIGUSR1)  # prints where it is
            time.sleep(0.2)
            pytest.fail(f"no answer within {PATIENCE * timeout:g} s; stderr: {self.errors()}")
        if "error" in answer:
            pytest.fail(answer["error"])
        return answer["value"]

    def do(self, source: str, timeout: float = 15):
        """Run the body of an async function and return what it returns."""
        self.begin(source)
        return self.result(timeout)

    def errors(self) -> str:
        """What it wrote to stderr."""
        self._errors.seek(0)
        return self._errors.read()

    def wait_for(self, expression: str, timeout: float = 10) -> None:
        """Wait until an expression is true there."""
        wait_for(lambda: self.do(f"return bool({expression})"), timeout, expression, 0.02)

    def logged(self) -> list[str]:
        """What it logged since the last call."""
        return self.do("log, me.log[:] = list(me.log), []\nreturn log")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._errors.close()
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
    there.do("me.fds = psutil.Process().num_fds()\nme.log.clear()")
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
    there.wait_for("not [c for c in Comm._instances if not c.closed()]")


@pytest.fixture
def here(pair: tuple[Puppet, Puppet], there: Puppet) -> Iterator[Puppet]:
    """The other process, which knows the secret."""
    here = pair[1]
    here.do("ucx.known_secrets['ucx://' + me.address] = me.secret\nme.log.clear()")
    yield here
    here.do("mock.patch.stopall()")


# Who is let in


def test_who_knows_the_secret_is_served(there: Puppet, here: Puppet):
    assert here.do(GREET) == {"x": 1}
    assert there.logged() == []


def test_who_does_not_know_it_is_refused_at_once_and_does_not_try_again(there, here):
    started = clock()
    text = here.do(
        """
        ucx.known_secrets["ucx://" + me.address] = b"x" * 32
        try:
            await connect("ucx://" + me.address, timeout=60)
        except OSError as error:
            return repr(error)
        """
    )
    assert clock() - started < 3
    assert text.startswith("FatalCommClosedError(")
    assert "did not prove itself" in text
    (line,) = there.logged()
    assert line.startswith("refused a ucx connection to ucx://127.0.0.1:")
    assert "does not know the secret" in line


def test_a_stranger_cannot_have_memory_allocated(there: Puppet, here: Puppet):
    there.do("dask.config.set({'distributed.comm.timeouts.connect': '1s'})")
    before = there.do("return psutil.Process().memory_info().rss")
    # with all of UCX's features, as distributed-ucxx has it
    stranger = Puppet(PRELUDE.replace("ucx.progress()", "base.init_once()"))
    try:
        port = here.do("return me.port")
        stranger.ready()
        for _ in range(2):
            stranger.do(
                f"""
                from ucxx._lib.arr import Array
                from ucxx._lib.libucxx import UCXEndpoint
                worker = base.ucxx.core._get_ctx().worker
                ep = UCXEndpoint.create(worker, "127.0.0.1", {port}, True)
                data, until = np.ones(2**27, "u1"), time.monotonic() + 1.5
                request = ep.am_send(Array(data))
                while time.monotonic() < until and not request.completed:
                    worker.progress()
                    await asyncio.sleep(0)
                """
            )
    finally:
        stranger.close()
    grown = there.do("return psutil.Process().memory_info().rss") - before
    assert grown < 2**26
    there.wait_for("not unproven()")
    assert here.do(GREET) == {"x": 1}


def test_silent_strangers_are_refused_in_the_user_s_time_and_leave_nothing_behind(there, here):
    """Regression: a deadline of 5 s refused workers that were busy, whatever the user had set."""
    there.do("dask.config.set({'distributed.comm.timeouts.connect': '100ms'})")
    before = there.do("return psutil.Process().num_fds()")
    here.do(
        """
        from ucxx._lib.libucxx import UCXEndpoint
        worker = base.ucxx.core._get_ctx().worker
        me.silent = [UCXEndpoint.create(worker, me.ip, me.port, True) for _ in range(10)]
        """
    )
    refused = "it did not prove itself within 0.1 s"
    there.wait_for(f"sum({refused!r} in line for line in me.log) == 10")
    here.do("[one.close_blocking() for one in me.silent]; me.silent = None")
    there.wait_for("not unproven()")
    there.wait_for(f"not gc.collect() * 0 and psutil.Process().num_fds() <= {before} + 3")


# Messages

OPEN = 'me.comm = await connect("ucx://" + me.address, timeout=60)\n'
#: Neither polls nor looks from time to time: a lost wake-up is a hang.
ASLEEP = """
mock.patch.object(ucx, "SAFETY_S", 60).start()
for name in ("ANSWER_POLL_S", "POLL_S"):
    mock.patch.object(ucx, name, 0.0).start()
ucx.progress()._timer.cancel()
"""


def test_an_idle_connection_costs_no_processor_time(there: Puppet, here: Puppet):
    here.do(OPEN + "await me.comm.write({'x': 1})\nreturn await me.comm.read()")
    shares = [
        puppet.do(
            """
            cpu = lambda: sum(psutil.Process().cpu_times()[:2])
            used = cpu()
            await asyncio.sleep(0.7)
            return (cpu() - used) / 0.7
            """
        )
        for puppet in (there, here)
    ]
    assert max(shares) < 0.1, shares
    here.do("await me.comm.close()")


@pytest.mark.parametrize("asleep", [True, False], ids=["by UCX's report", "by polling"])
def test_messages_of_all_sizes_arrive_both_ways_at_once(there: Puppet, here: Puppet, asleep: bool):
    if asleep:
        there.do(ASLEEP)
        here.do(ASLEEP)
    seconds = here.do(
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

        start = clock()
        await asyncio.gather(*(talk(which) for which in range(3)))
        return clock() - start
        """,
        40,
    )
    assert seconds < 20
    assert there.logged() == []


def test_connections_are_forgotten_when_nobody_holds_them(there: Puppet, here: Puppet):
    assert here.do(GREET) == {"x": 1}
    before = there.do("return psutil.Process().num_fds()")
    for _ in range(5):
        here.do(OPEN)  # the one before is dropped without a goodbye
    here.do("me.comm = None; gc.collect()")
    there.wait_for("all(comm.closed() for comm in me.comms)")
    there.do("me.comms.clear()")
    there.wait_for("not gc.collect() * 0 and not [*Comm._instances]")
    there.wait_for(f"psutil.Process().num_fds() <= {before} + 3")
    here.wait_for("not gc.collect() * 0 and not [*Comm._instances]")


#: An OSError ends each; how, and after how many seconds.
ENDED = """
async def ended(work):
    start = clock()
    try:
        async with asyncio.timeout(60):
            await work
    except OSError as error:
        return [type(error).__name__, clock() - start]
    return ["none", 0]
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
        assert [name for name, _ in ends] == ["CommClosedError"] * 2
        assert max(seconds for _, seconds in ends) < 3
    finally:
        mortal.close()
    text, seconds = here.do(
        f"""
        start = clock()
        try:
            await connect("ucx://{address}", timeout=1)
        except OSError as error:
            return [str(error), clock() - start]
        """
    )
    assert "Timed out" in text
    assert seconds < 2
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
        seconds, ends = here.do(
            """
            start = clock()
            me.tasks[0].cancel(), me.tasks[1].cancel()
            await me.comms[2].close()
            ends = await asyncio.gather(*me.tasks, return_exceptions=True)
            return [clock() - start, [type(end).__name__ for end in ends]]
            """
        )
        assert ends == ["CancelledError", "CancelledError", "CommClosedError"]
        assert seconds < 3
        assert here.do("return [comm.closed() for comm in me.comms]") == [True] * 3
    finally:
        os.kill(still.process.pid, signal.SIGCONT)
        still.close()
    assert here.do(GREET) == {"x": 1}


def test_what_is_closed_stays_closed(there: Puppet, here: Puppet):
    ends = here.do(
        ENDED
        + OPEN
        + """
comm = me.comm
reading = [asyncio.create_task(ended(comm.read()))]
await asyncio.sleep(0.02)
await asyncio.gather(comm.close(), comm.close())
comm.abort()
ends = [await one for one in reading]
for work in (comm.read, lambda: comm.write({"x": 1})):
    ends.append(await ended(work()))
await comm.close()
return ends
"""
    )
    assert [name for name, _ in ends] == ["CommClosedError"] * 3
    assert max(seconds for _, seconds in ends) < 1


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


def test_what_cannot_be_sent_breaks_nothing(there: Puppet, here: Puppet):
    answer = here.do(
        OPEN
        + """
class Unwilling:
    def __reduce__(self):
        raise ValueError("not me")
try:
    await me.comm.write({"x": to_serialize(Unwilling())}, on_error="raise")
except Exception as error:
    refused = type(error).__name__
await me.comm.write({"x": 2})
return [refused, await me.comm.read()]
"""
    )
    assert answer[1] == {"x": 2}


def test_a_new_event_loop_takes_over():
    program = """
async def talk():
    async def echo(comm):
        await comm.write(await comm.read())
    ucx.register()
    listener = listen("ucx://127.0.0.1:0", echo)
    await listener.start()
    ucx.known_secrets[listener.contact_address] = listener.secret
    comm = await connect(listener.contact_address, timeout=60)
    await comm.write({"x": 1})
    print(await comm.read())
    await comm.close()
    listener.stop()
import asyncio
from distributed.comm import connect, listen
from hpcdask.comm import ucx
for _ in range(3):
    asyncio.run(talk())
"""
    env = {**clean_environment(), "UCXPY_PROGRESS_MODE": "blocking"}
    env["UCX_WARN_UNUSED_ENV_VARS"] = "n"
    ended = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=180
    )
    assert (ended.returncode, ended.stdout) == (0, "{'x': 1}\n" * 3)
    assert ended.stderr == ""


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
    me.worker.rpc._validate()
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
    assert a.do("return me.worker.rpc._validate()") is None
    assert "ucx" not in scheduler.do("return sorted(c.peer_address for c in Comm._instances)")


def test_client_without_ucx_runs_scatters_and_gathers(cluster):
    scheduler, a, b = cluster
    assert scheduler.do(
        """
        import dask.array as da
        x = da.random.random((1500, 1500), chunks=500)
        total = await me.client.compute((x + x.T).sum())
        (y,) = await me.client.scatter([np.arange(10**5)], broadcast=True)
        back = await me.client.gather(y)
        names = await me.client.run(lambda dask_worker: dask_worker.name)
        z = me.client.submit(lambda x: x + 1, y, workers=["b"])
        assert np.array_equal(await z, np.arange(10**5) + 1)
        ones = da.ones((1500, 1500), chunks=500)
        assert await me.client.compute((ones + ones.T).sum()) == 2 * 1500**2
        return [len(back), sorted(names.values()), bool(0 < total < 2 * 1500**2)]
        """
    ) == [10**5, ["a", "b"], True]
    schemes = a.do("return [c.peer_address for c in me.worker.rpc._created]")
    assert not [s for s in schemes if s.startswith("tcp") and s == b.address]


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
        me.worker.rpc._validate()
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
    b.do("me.told, me.worker._ucx = me.worker._ucx, mock.Mock(secret=b'z' * 32)")
    try:
        yield
    finally:
        b.do("me.worker._ucx = me.told")


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


def test_the_user_is_told_once_where_data_keep_coming_over_tcp(cluster):
    _, a, b = cluster
    with deceived(a, b):
        a.do(
            f"""
            while me.worker.rpc.routes.get({b.address!r}, mock.Mock(failures=0)).failures < 3:
                assert await me.fetch({b.address!r}) == "tcp"
                await asyncio.sleep(0.05)
            """
        )
    kinds = a.do(f"await asyncio.sleep(0.5)\nreturn [await me.fetch({b.address!r}) for _ in 'ab']")
    assert kinds == ["tcp"] * 2
    (line,) = [line for line in a.logged() if line.startswith(f"no ucx to {b.address} in 3 attem")]
    assert "comes over tcp from now on" in line
    forget(a, b.address)
    assert a.do(f"return await me.fetch({b.address!r})") == "ucx"


@pytest.mark.parametrize("fault", ["does not answer", "has another address by now"])
def test_a_peer_is_waited_for_as_long_as_the_user_says_and_then_reached_over_tcp(cluster, fault):
    """Regression: a deadline of 10 s instead, and a busy peer was taken for a broken stream."""
    _, a, b = cluster
    forget(a, b.address)
    if fault == "does not answer":
        b.do(
            """
            me.tell = me.worker.handlers[peers.CONTACT]
            me.worker.handlers[peers.CONTACT] = lambda asker: asyncio.sleep(100)
            """
        )
    else:
        a.do(
            f"""
            await me.fetch({b.address!r})
            me.worker.rpc.routes[{b.address!r}].contact = "ucx://127.0.0.1:9"
            ucx.known_secrets["ucx://127.0.0.1:9"] = b"x" * 32
            for comm in me.worker.rpc.available.pop({b.address!r}):
                comm.abort()
                me.worker.rpc.semaphore.release()
            """
        )
    seconds, waited, kind = a.do(
        f"""
        start, wall = clock(), time.monotonic()
        with dask.config.set({{"distributed.comm.timeouts.connect": "1s"}}):
            kind = await me.fetch({b.address!r})
        return [clock() - start, time.monotonic() - wall, kind]
        """
    )
    assert kind == "tcp"
    assert seconds < 5
    assert fault == "has another address by now" or waited > 0.9
    if fault == "does not answer":
        b.do("me.worker.handlers[peers.CONTACT] = me.tell")
    wait_for(lambda: a.do(f"return await me.fetch({b.address!r})") == "ucx", 10, "ucx again")


def test_a_worker_that_goes_while_it_is_asked(cluster):
    _, a, _b = cluster
    text = a.do(
        """
        asked = asyncio.Event()
        async def silent(reader, writer):
            asked.set()
            await asyncio.sleep(600)
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        addr = "tcp://127.0.0.1:%d" % server.sockets[0].getsockname()[1]
        tasks = [asyncio.create_task(me.worker.rpc.connect(addr)) for _ in range(3)]
        await asked.wait()
        me.worker.rpc.remove(addr)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        server.close()
        me.worker.rpc._validate()
        return [repr(end) for end in ends] + [addr in me.worker.rpc.routes]
        """
    )
    assert text == ["CommClosedError('Address removed.')"] * 3 + [False]


def test_a_worker_over_tcp_or_whose_ucx_does_not_start_is_warm_too(cluster):
    scheduler, _a, b = cluster
    b.do("me.more = await me.start('tcp', name='over tcp')")
    assert warm(scheduler, "over tcp")["links"] == []
    b.do("await me.more.close()")
    transports = b.do(
        """
        with mock.patch.object(PeerWorker, "_listen_on_ucx", side_effect=RuntimeError("no")):
            me.more = await me.start("auto", name="failed")
            await me.more._warming
        return me.more.exchange
        """
    )
    assert transports == "tcp"
    assert warm(scheduler, "failed")["links"] == []
    assert [line for line in b.logged() if "ucx does not start in worker failed" in line]
    b.do("await me.more.close()")


def test_ucx_that_nobody_asked_for_by_name_starts_once_the_worker_is_up(cluster):
    """Until then whoever dials it, and whom it dials, waits rather than take tcp for good."""
    scheduler, _a, b = cluster
    at_first, held, later = b.do(
        """
        go, listen = asyncio.Event(), PeerWorker._listen_on_ucx
        async def late(worker):
            await go.wait()
            await listen(worker)
        with mock.patch.object(PeerWorker, "_listen_on_ucx", late):
            me.more = await me.start("auto", name="better")
            at_first = me.more._ucx_address
            asked = asyncio.create_task(me.fetch(me.more.address))
            await asyncio.sleep(0.1)
            held = asked.done()
            go.set()
            await me.more._warming
        return [at_first, held, await asked]
        """
    )
    assert [at_first, held, later] == [None, False, "ucx"]
    links = warm(scheduler, "better")["links"]
    assert {link["transport"] for link in links} == {"ucx"}, links
    b.do("await me.more.close()")


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


def wait_until_warm():
    deadline = time.monotonic() + 120
    while not all(client.run(warm).values()) and time.monotonic() < deadline:
        time.sleep(0.05)


client = Client()
wait_until_warm()
add()
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
    (site.folder / "add.py").write_text(PROGRAM)
    ended = site.run("--protocol", "ucx", "add.py", find=False, n=2)
    assert ended.code == 0, str(ended)
    assert ended.out.splitlines() == ["before ['ucx'] ['ucx']", "after ['ucx'] ['ucx']"]
    assert not ended.foreign_lines, str(ended)
    assert "is replaced" not in ended.err  # the program asked for it
    assert "ucx between 1 pair of workers (" in ended.err
    assert "goes over tcp" not in ended.err


@pytest.mark.long
@pytest.mark.skipif(not fabric.interfaces(), reason="a machine without a network")
def test_a_run_whose_user_keeps_ucx_from_the_loopback(site: Site):
    (site.folder / "add.py").write_text(PROGRAM)
    site.env["UCX_NET_DEVICES"] = fabric.interfaces()[0].name
    ended = site.run("--protocol", "ucx", "add.py", find=False, n=2)
    assert ended.code == 0, str(ended)
    assert ended.out.splitlines() == ["before ['ucx'] ['ucx']", "after ['ucx'] ['ucx']"]
    assert "no ucx to" not in ended.err


def test_ucx_that_does_not_start_is_told_in_a_line(site: Site):
    (site.folder / "add.py").write_text(PROGRAM)
    site.env |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "~none"}  # a pattern that it does not know
    ended = site.run("--protocol", "ucx", "add.py", find=False, n=2)
    assert ended.code == 1, str(ended)
    assert "--protocol ucx: ucx does not start: UCXXNoDeviceError" in ended.err
    assert "Traceback" not in ended.err


HOOKED = """
from distributed import Client
def hooked():
    import os
    return ["libucs.so" in open(f"/proc/{pid}/maps").read() for pid in (os.getpid(), os.getppid())]
print(*Client().run(hooked).values())
"""


@pytest.mark.parametrize("protocol", ["ucx", "tcp", "auto"])
def test_workers_are_forked_with_the_hooks_of_ucx_where_they_may_use_it(site: Site, protocol: str):
    (site.folder / "hooked.py").write_text(HOOKED)
    ended = site.run("--protocol", protocol, "hooked.py", find=False, n=1)
    assert ended.code == 0, str(ended)
    assert ended.out == f"{[protocol == 'ucx'] * 2}\n"  # auto: not without a GPU
