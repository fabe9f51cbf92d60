"""The process that becomes the worker: made ready early, taken over, or left for the template."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import dask
import pytest
from distributed import Security
from distributed.core import Status

from hpcdask.bootstrap.ranks import Rank
from hpcdask.errors import DeviceError
from hpcdask.gpu import driver
from hpcdask.gpu.devices import Gpu
from hpcdask.node import gpu_probe, inventory, nanny, worker_group
from hpcdask.node.gpu_probe import EarlyOptions
from hpcdask.node.nanny import BoundNanny
from hpcdask.runner.agent import RankAgent
from hpcdask.runner.arrivals import Arrivals, RankReport
from hpcdask.runner.events import Events
from hpcdask.spec.specs import RunSpec

A, B = "GPU-aaaa", "GPU-bbbb"

PARENT = """
import multiprocessing, os, signal, socket, sys, tempfile, time
from hpcdask.node import forkserver, prestart
from hpcdask.node.gpu_probe import EarlyOptions

EARLY = EarlyOptions(in_run=True)

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
    forkserver.wait_for_worker(line)

def gone(pid):
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.01)

def work(answers, orders):
    answers.put((os.getpid(), os.getppid(), orders.get(timeout=180), dict(os.environ),
                 "hpcdask.node.nanny" in sys.modules))
    answers.close(), answers.join_thread()
    if orders.get(timeout=180) == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(3)

context = multiprocessing.get_context("forkserver")

def start():
    global answers, orders
    answers, orders = context.Queue(), context.Queue()
    process = context.Process(target=work, args=(answers, orders))
    process.start()
    orders.put("first")
    found = answers.get(timeout=180)
    assert found[0] == process.pid and found[2] == "first"
    return process, found

def end(process, how="end"):
    orders.put(how)
    process.join(120)
    return process.exitcode

if __name__ == "__main__":
    folder = tempfile.mkdtemp()
"""


def run(folder: Path, body: str) -> None:
    """Run a program whose every assertion holds, and which says nothing."""
    path = folder / "parent.py"
    path.write_text(PARENT + "".join(f"    {line}\n" for line in body.strip().splitlines()))
    done = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr


def test_the_next_that_is_started_is_the_one_on_offer(tmp_path):
    run(
        tmp_path,
        """
waiting = [early(wait), early(wait)]
forkserver.start(folder, lambda: None)
for (pid, line), how, code in zip(waiting, ("end", "die"), (3, -signal.SIGKILL)):
    forkserver.adopt(pid, line)
    process, found = start()
    assert found[:2] == (pid, os.getpid())
    assert process.is_alive() and process.exitcode is None
    assert end(process, how) == code
process, found = start()  # the template's
assert found[0] not in dict(waiting) and found[1] != os.getpid()
assert end(process, "die") == -signal.SIGKILL
""",
    )


def test_one_that_is_gone_is_replaced_by_the_template_s(tmp_path):
    run(
        tmp_path,
        """
dead = early(lambda line: None)
os.waitid(os.P_PID, dead[0], os.WEXITED | os.WNOWAIT)
forkserver.start(folder, lambda: None)
forkserver.adopt(*dead)
process, found = start()
assert found[0] != dead[0] and found[1] != os.getpid()
assert end(process) == 3
gone(dead[0])  # no zombie either
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
    prestart.prestart(lambda: "{A}", line, EARLY)
waiting = early(ready)
assert "distributed" not in sys.modules
forkserver.start(folder, lambda: None)
forkserver.adopt(*waiting)
process, found = start()
assert found[0] == waiting[0] and found[3]["CUDA_VISIBLE_DEVICES"] == "{A}"
assert os.path.exists(folder + "/context") and found[4]
assert end(process) == 3
""",
    )


@pytest.mark.parametrize(
    ("sure", "fault"), [(True, "raise ValueError('error 12345')"), (False, "pass")]
)
def test_its_context_does_not_wait_for_nvml_where_its_device_is_foreseen(tmp_path, sure, fault):
    """Where NVML sees it otherwise it ends, and lets the device go."""
    run(
        tmp_path,
        f"""
def start_cuda():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "{A}"
    open(folder + "/started", "w").close()
prestart.ucx_hooks.install = prestart._prepare_imports = lambda: None
prestart.start_cuda = start_cuda
def make():
    assert os.path.exists(folder + "/started") and os.environ["CUDA_VISIBLE_DEVICES"] == "{A}"
    open(folder + "/context", "w").close()
    {fault}
prestart.make_context = make
def look():
    while not os.path.exists(folder + "/context"):
        time.sleep(0.01)
    time.sleep(0.5)  # it is waited for, also where the context fails
    return "{A}" if {sure} else None
def ready(line):
    prestart.prestart(look, line, EARLY, "{A}")
pid, line = early(ready)
if {sure}:
    forkserver.start(folder, lambda: None)
    forkserver.adopt(pid, line)
    process, found = start()
    assert found[0] == pid and found[3]["CUDA_VISIBLE_DEVICES"] == "{A}"
    assert end(process) == 3
else:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 99
""",
    )


def test_it_ends_where_it_is_not_to_be_one(tmp_path):
    run(
        tmp_path,
        f"""
def no_device(line):
    prestart.prestart(lambda: None, line, EARLY)
    os._exit(7)
def no_imports(line):
    sys.modules["hpcdask.node.nanny"] = None
    prestart.prestart(lambda: time.sleep(0.5) or told.append(1) or "{A}", line, EARLY)
    os._exit(7 + len(told))
told = []
prestart.make_context = lambda: None
for child, code in ((no_device, 7), (no_imports, 8)):
    pid, line = early(child)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
pid, line = early(wait)
line.close()  # as when the rank dies
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
""",
    )


PROBE = """
from hpcdask.node import gpu_probe
from hpcdask.bootstrap.ranks import Rank
from hpcdask.errors import DeviceError

def start_probe():
    gpu_probe.has_nvidia_driver = lambda: True
    gpu_probe.ranks.detect = lambda: Rank(1, 2, 1, 2, "n1", "srun", "launch")
    gpus = gpu_probe.Gpu("GPU-other", "H200", 1), gpu_probe.Gpu("GPU-own", "H200", 1)
    gpu_probe._ask = lambda environ, every: gpu_probe.ProbeResult(gpus, gpus)
    gpu_probe.os.sched_getaffinity = lambda pid: {0, 1}
    prestart.make_context = lambda: None
    return gpu_probe.GpuProbe.start(lambda: None, EARLY, prestart.prestart)
"""


def test_a_probe_that_fails_says_why(monkeypatch, capfd):
    def fail(*arguments: object) -> None:
        raise ValueError("odd")

    monkeypatch.setattr(gpu_probe, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(gpu_probe, "_serve", fail)
    probe = gpu_probe.GpuProbe.start(lambda: None, EarlyOptions(in_run=True))
    with pytest.raises(DeviceError, match="has died"):
        probe.report()
    probe.dismiss()
    assert "ValueError: odd" in capfd.readouterr().err


def test_the_probe_becomes_the_worker_or_is_dismissed(tmp_path):
    run(
        tmp_path,
        PROBE
        + """
found = start_probe()
forkserver.start(folder, found.release_in_child)
told = found.report()
assert told.gpus == told.shown
assert [gpu.uuid for gpu in told.gpus] == ["GPU-other", "GPU-own"] and found.uuid == "GPU-own"
pid, line = found.give()
forkserver.adopt(pid, line)
process, what = start()
found.dismiss()  # as when all workers are there
assert process.is_alive() and what[:2] == (pid, os.getpid())
assert what[3]["CUDA_VISIBLE_DEVICES"] == "GPU-own"
assert end(process) == 3
gone(pid)
found = start_probe()
found.report()
pid = found._pid
found.dismiss()
found.dismiss()
gone(pid)
""",
    )


# Whether a rank's probe may become its worker, and on which GPU


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
        (None, 8, "script.py", False),  # MPI must be asked first
    ],
)
def test_who_may(monkeypatch, at, cores, options, may):
    early = EarlyOptions.read(options.split(), in_run=True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert gpu_probe._may_prestart(at, early) is may


@pytest.mark.parametrize(
    ("visible", "files", "may"),
    [("0", 8, True), ("0,1", 8, False), ("", 1, False), (None, 1, True), (None, 8, False)],
)
def test_an_only_rank_may_where_it_sees_one_gpu(monkeypatch, visible, files, may):
    """With several it has a worker for each, or the job chooses one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(gpu_probe.glob, "glob", lambda _: [f"/dev/nvidia{n}" for n in range(files)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_probe._may_prestart(rank(), EarlyOptions(in_run=True)) is may


@pytest.mark.parametrize(
    ("options", "in_run", "size", "installed"),
    [
        ("--protocol=tcp", True, 2, False),
        ("", True, 1, False),
        ("", False, 1, True),  # a job's peers are in other jobs
    ],
)
def test_the_hooks_of_ucx_where_it_may_be_used(tmp_path, options, in_run, size, installed):
    run(
        tmp_path,
        f"""
options = EarlyOptions.read("{options}".split(), in_run={in_run})
os.environ.update(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="{size}",
                  OMPI_COMM_WORLD_LOCAL_RANK="0", OMPI_COMM_WORLD_LOCAL_SIZE="{size}",
                  CUDA_VISIBLE_DEVICES="0")
def note():
    assert len(os.listdir("/proc/self/task")) == 1
    open(folder + "/installed", "w").close()
prestart.ucx_hooks.install = note
pid, line = early(lambda line: prestart.prestart(lambda: None, line, options))
assert os.waitpid(pid, 0)[1] == 99 << 8
assert os.path.exists(folder + "/installed") == {installed}
""",
    )


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
def test_on_which_gpu(at, uuids, options, expected):
    early = EarlyOptions.read(options.split(), in_run=True)
    assert gpu_probe._choose(at, uuids, early) == expected


WHOLE = [driver.DriverFile(A, accessible=True), driver.DriverFile(B, accessible=True)]


@pytest.mark.parametrize(
    ("at", "files", "visible", "seen", "expected"),
    [
        # the node's first asks NVML for all
        (rank(0, 2), WHOLE, None, [A, B], ("asked for all", A, A)),
        (rank(), WHOLE, "1", [B], ("asked", B, B)),
        (rank(1, 2), WHOLE, None, [A, B], ("left", B, B)),
        (rank(1, 2), WHOLE, "0,1", [A, B], ("left", B, B)),
        # some of the node's, or all that a container shows: it may be the only one that sees them
        (rank(1, 2), WHOLE, "1", [B], ("asked", B, B)),
        (rank(1, 2), [WHOLE[0]._replace(accessible=False), WHOLE[1]], "0", [B], ("asked", B, B)),
        (rank(1, 2), WHOLE[1:], None, [B], ("asked", B, B)),
        # NVML sees others
        (rank(1, 2), WHOLE, "1", [A], ("asked", B, "ended")),
        # the files do not tell
        (rank(1, 2), [], None, [A, B], ("asked", None, B)),
        (rank(1, 2), [WHOLE[0], WHOLE[1]._replace(uuid="GPU-?")], None, [A, B], ("asked", None, B)),
        # nor does the number of ranks
        (rank(2, 3), WHOLE, None, [A, B], ("asked", None, None)),
        (None, WHOLE, None, [A, B], ("asked",)),  # MPI must be asked: it only looks
    ],
)
def test_who_asks_nvml(monkeypatch, at, files, visible, seen, expected):
    """The first rank of a node, and those that see something else."""
    told, held, report = serve(monkeypatch, at, files, visible, seen)
    assert tuple(told) == expected
    if told[0] == "left":
        assert [gpu["uuid"] for gpu in report["gpus"]] == report["fabric"]["gpus"] == seen
    assert (report["shown"] is None) == (told[0] == "left")
    assert report["prestarts"] in (told[-1], None)
    assert bool(report["prestarts"]) == (told[-1] in (A, B))
    assert bool(held) == (told[1:] in ([], [None, None]))


def test_the_parts_of_a_job_ask_nvml_each(monkeypatch):
    """They do not meet: nobody would tell them."""
    told, _, _ = serve(monkeypatch, rank(1, 2), WHOLE, None, [A, B], in_run=False)
    assert told == ["asked", B, B]


def serve(
    monkeypatch, at, files, visible, seen, *, in_run=True
) -> tuple[list[object], list[object], dict[str, Any]]:
    """What a probe does and reports: whom it asks, what it foresees, and what it finds then."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(gpu_probe, "driver_files", lambda: files)
    monkeypatch.setattr(gpu_probe, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(gpu_probe.ranks, "detect", lambda: at)
    told: list[object] = ["left"]
    held: list[object] = []

    def ask(environ, every):
        assert environ.get("CUDA_VISIBLE_DEVICES") == visible
        told[0] = "asked for all" if every else "asked"
        gpus = tuple(Gpu(uuid, "H200", 1) for uuid in seen)
        return gpu_probe.ProbeResult(gpus, gpus)

    def end(code):
        raise SystemExit(code)

    def prestart(look, line, early, foreseen):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", foreseen or "")  # as it does
        told.append(foreseen)
        try:
            told.append(look())
        except SystemExit:
            told.append("ended")

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(gpu_probe, "_ask", ask)
    monkeypatch.setattr(gpu_probe, "_hold_open", lambda rank, uuids: held.append(uuids) or [])
    read_end, write_end = os.pipe()
    gpu_probe._serve(write_end, mock.Mock(), EarlyOptions(in_run), prestart)
    with open(read_end) as pipe:
        return told, held, json.load(pipe)


def test_rank_0_fills_in_what_was_left_to_the_first(monkeypatch):
    """From the report of a probe to the view that the plan is made of."""
    gpus = [Gpu(uuid, "H200", 141 << 30, (0, 1)) for uuid in (A, B)]
    left = [Gpu(uuid, "", 0) for uuid in (A, B)]
    monkeypatch.setattr(inventory, "check_extras", mock.Mock())

    def agent_of(index: int, gpus: list[Gpu], shown: list[Gpu] | None) -> RankAgent:
        found = mock.Mock()
        found.report.return_value = gpu_probe.ProbeResult(tuple(gpus), shown and tuple(shown))
        return RankAgent(RunSpec(), rank(index, 2), mock.Mock(), "", None, found)

    one, two = agent_of(0, gpus, gpus), agent_of(1, left, None)
    arrivals = Arrivals(one.rank, Events())
    arrivals.reports[0] = one.report()
    arrivals.reports[1] = RankReport.from_json(json.loads(json.dumps(two.report().to_json())))
    views = arrivals.inventories()
    assert {index: list(view.gpus) for index, view in views.items()} == {0: gpus, 1: gpus}


# What the rank does with it


def started(monkeypatch, count: int, probe: mock.Mock, change=None) -> list[tuple[int, str]]:
    """Offers that were made when the nannies of a rank started their workers."""
    offers: list[tuple[int, str]] = []
    monkeypatch.setattr(nanny.forkserver, "adopt", lambda *given: offers.append(given))

    async def instantiate(self):
        assert probe.dismiss.called is not bool(offers), "the device is not free"
        return Status.running

    class Early(BoundNanny):
        async def start(self):
            if change:
                change(self)
            await self.instantiate()
            await self.instantiate()

        def __await__(self):
            return self.start().__await__()

        async def finished(self):
            """It has ended at once."""

    def make(*args, **kwargs):
        own = {"CUDA_VISIBLE_DEVICES": A, "UCX_TLS": "tcp"}
        return Early("tcp://127.0.0.1:1", env=own, dashboard=False)

    monkeypatch.setattr(nanny.Nanny, "instantiate", instantiate)
    monkeypatch.setattr(worker_group, "make_nanny", make)
    group = worker_group.WorkerGroup(RunSpec(), "n1", "", probe)

    async def start():
        await group.start([mock.Mock()] * count, "tcp://127.0.0.1:1", Security())

    asyncio.run(start())
    assert group.probe is None
    assert probe.dismiss.called
    return offers


@pytest.mark.parametrize(
    ("uuid", "workers", "taken"),
    [
        (A, 1, True),
        (B, 1, False),  # the worker's is A
        (A, 2, False),  # multiprocessing cannot tell which is whose
    ],
)
def test_it_is_taken_by_the_one_worker_of_its_gpu(monkeypatch, uuid, workers, taken):
    probe = mock.Mock(uuid=uuid, **{"give.return_value": (17, "line")})
    assert started(monkeypatch, workers, probe) == [(17, "line")] * taken


@pytest.mark.parametrize(
    ("added", "taken"),
    [
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, False),
        ({"CUPY_ACCELERATORS": "cub"}, False),
        ({"HERE_TOO": "1"}, True),
    ],
)
def test_variables_that_it_lacks_are_for_one_from_the_template(monkeypatch, added, taken):
    """Of Dask's configuration, or of a plugin that changes the nanny before its worker starts."""
    monkeypatch.setenv("HERE_TOO", "1")
    for ways in ("configuration", "plugin"):
        probe = mock.Mock(uuid=A, **{"give.return_value": (17, "line")})
        with dask.config.set(
            {"distributed.nanny.environ": added if ways == "configuration" else {}}
        ):
            change = (lambda made: made.env.update(added)) if ways == "plugin" else None
            assert started(monkeypatch, 1, probe, change) == [(17, "line")] * taken
