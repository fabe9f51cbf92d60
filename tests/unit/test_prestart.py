"""The process that becomes the worker: made ready early, taken over, or left for the template."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from hpcdask import member, scout
from hpcdask.devices import Gpu
from hpcdask.member import Member
from hpcdask.nanny import Place
from hpcdask.ranks import Rank
from hpcdask.spec import RunSpec

A, B = "GPU-aaaa", "GPU-bbbb"

PARENT = """
import multiprocessing, os, signal, socket, sys, tempfile
from hpcdask import prestart, template

def early(in_child):
    line, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        line.close()
        in_child(theirs)
        os._exit(99)
    theirs.close()
    return pid, line

def wait(line):
    template.await_order(line, 20)

def work(answers, orders):
    answers.put((os.getpid(), os.getppid(), orders.get(timeout=20), dict(os.environ)))
    answers.close(), answers.join_thread()
    if orders.get(timeout=20) == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(3)

context = multiprocessing.get_context("forkserver")

def start():
    global answers, orders
    answers, orders = context.Queue(), context.Queue()
    process = context.Process(target=work, args=(answers, orders))
    process.start()
    orders.put("first")
    found = answers.get(timeout=20)
    assert found[0] == process.pid and found[2] == "first"
    return process, found

def end(process, how="end"):
    orders.put(how)
    process.join(20)
    return process.exitcode

if __name__ == "__main__":
    folder = tempfile.mkdtemp()
"""


def run(folder: Path, body: str) -> None:
    """Run a program whose every assertion holds, and which says nothing."""
    path = folder / "parent.py"
    path.write_text(PARENT + "".join(f"    {line}\n" for line in body.strip().splitlines()))
    done = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr


def test_the_next_that_is_started_is_the_one_on_offer(tmp_path):
    run(
        tmp_path,
        """
waiting = early(wait)
template.start(folder, lambda: None)
template.offer(*waiting)
process, found = start()
assert found[:2] == (waiting[0], os.getpid())
assert process.is_alive() and process.exitcode is None
assert end(process) == 3
process, found = start()  # the template's
assert found[0] != waiting[0] and found[1] != os.getpid()
assert end(process, "die") == -signal.SIGKILL
""",
    )


def test_its_death_is_noticed(tmp_path):
    run(
        tmp_path,
        """
waiting = early(wait)
template.start(folder, lambda: None)
template.offer(*waiting)
process, found = start()
assert found[0] == waiting[0]
assert end(process, "die") == -signal.SIGKILL
""",
    )


def test_one_that_is_gone_is_replaced_by_the_template_s(tmp_path):
    run(
        tmp_path,
        """
gone = early(lambda line: None)
os.waitid(os.P_PID, gone[0], os.WEXITED | os.WNOWAIT)
template.start(folder, lambda: None)
template.offer(*gone)
process, found = start()
assert found[0] != gone[0] and found[1] != os.getpid()
assert end(process) == 3
""",
    )


@pytest.mark.parametrize("fault", ["pass", "raise DeviceError('no room')"])
def test_it_has_its_device_and_imports_before_the_order(tmp_path, fault):
    """Where its context fails, the worker is to say so: it makes it once more."""
    run(
        tmp_path,
        f"""
from hpcdask.errors import DeviceError
def make():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "{A}"
    open(folder + "/context", "w").close()
    {fault}
prestart.make_context = make
def ready(line):
    prestart.prestart(lambda: "{A}", line, 20)
waiting = early(ready)
assert "distributed" not in sys.modules
template.start(folder, lambda: None)
template.offer(*waiting)
process, found = start()
assert found[0] == waiting[0] and found[3]["CUDA_VISIBLE_DEVICES"] == "{A}"
assert os.path.exists(folder + "/context")
assert end(process) == 3
""",
    )


def test_it_gives_up_where_there_is_no_order_or_no_one_device(tmp_path):
    run(
        tmp_path,
        f"""
def not_wanted(line):
    prestart.prestart(lambda: "{A}", line, 0.1)
    os._exit(7)
def no_device(line):
    prestart.prestart(lambda: None, line, 20)
    os._exit(7)
for child in (not_wanted, no_device):
    pid, line = early(child)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
pid, line = early(lambda line: (wait(line), os._exit(7)))
line.close()  # as when the rank dies
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
""",
    )


# Whether a rank's scout may become its worker, and on which GPU


def rank(local: int = 0, of: int = 1, launcher: str = "openmpi") -> Rank:
    return Rank(local, of, local, of, "n1", launcher, "launch")


@pytest.mark.parametrize(
    ("at", "cores", "options", "may"),
    [
        (rank(), 2, "script.py", True),
        (rank(), 1, "script.py", False),  # its imports would hold up the rank's
        (rank(1, 8), 16, "script.py", True),
        (rank(1, 8), 15, "script.py", False),
        (rank(1, 8, "srun"), 2, "script.py", True),  # each has cores of its own
        (rank(1, 8, "srun"), 1, "script.py", False),
        (rank(), 8, "--device cpu script.py", False),
        (rank(), 8, "--device=cpu script.py", False),
        (rank(), 8, "--layout dedicated script.py", False),  # the first two have no worker
        (None, 8, "script.py", False),  # MPI must be asked first
    ],
)
def test_who_may(monkeypatch, at, cores, options, may):
    monkeypatch.setattr(sys, "argv", ["run.py", *options.split()])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert scout._has_room(at) is may


@pytest.mark.parametrize(
    ("at", "uuids", "options", "expected"),
    [
        (rank(1, 2), [A, B], "", B),
        (rank(1, 2), [A], "", A),  # each its own, or shared
        (rank(3, 4), [A, B], "", None),  # some of the node's: whose they are is decided later
        (rank(3, 4), [A, B], "--oversubscribe", B),
        (rank(), [A], "", A),
        (rank(), [A, B], "", None),  # a worker for each, or one that the job chooses
        (rank(), [], "", None),
        (None, [A], "", None),
    ],
)
def test_on_which_gpu(monkeypatch, at, uuids, options, expected):
    monkeypatch.setattr(sys, "argv", ["run.py", *options.split()])
    assert scout._choose(at, [{"uuid": uuid} for uuid in uuids]) == expected


# What the rank does with it


def place(uuid: str | None) -> Place:
    gpu = uuid and Gpu(uuid, "H200", 2**37, "0000:01:00.0")
    return Place("w", gpu or None, (0,), 1, 0)


@pytest.mark.parametrize(
    ("places", "environ", "taken"),
    [
        ([A], {}, True),
        ([B], {}, False),
        ([None], {}, False),
        ([A, B], {}, False),  # multiprocessing cannot tell which is whose
        ([A], {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, False),  # the driver has been started without
        ([A], {"CUDA_VISIBLE_DEVICES": A, "UCX_TLS": "tcp"}, True),
    ],
)
def test_it_is_taken_where_it_is_what_the_worker_would_be(monkeypatch, places, environ, taken):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)

    async def started() -> None:
        assert found.dismiss.called is not taken  # the device is free by then
        assert offer.called is taken

    class Nanny:
        env = environ

        def __await__(self):
            return started().__await__()

        async def finished(self) -> None:
            """It has ended at once."""

    offer = mock.Mock()
    monkeypatch.setattr(member, "make_nanny", lambda *args, **kwargs: Nanny())
    monkeypatch.setattr(member.template, "offer", offer)
    found = mock.Mock(uuid=A, **{"give.return_value": (17, "line")})
    one = Member(RunSpec(), rank(), mock.Mock(), "", None, found)
    one.ending = True
    asyncio.run(one.start_workers([place(uuid) for uuid in places], "tcp://127.0.0.1:1"))
    assert offer.call_args_list == ([mock.call(17, "line")] if taken else [])
    assert one.scout is None
