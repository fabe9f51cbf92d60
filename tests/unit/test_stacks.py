"""What is seen of a run: one process in two ways, a thousand workers on one screen, the guess."""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from hpcdask.errors import UsageError
from hpcdask.jobs.detached import CONTROL, NOTEBOOK
from hpcdask.node import observe
from hpcdask.node.observe import Frame, ProcessView, ThreadView, read_written
from hpcdask.security import private
from hpcdask.stacks.blocks import BUSY, blocks
from hpcdask.stacks.diagnose import diagnose
from hpcdask.stacks.look import NAMELESS, Report, Script, WorkerLook, find
from hpcdask.stacks.show import lines
from launching import wait_for

HANGING = """
import itertools, sys, threading
from hpcdask.process import make_observable

def wait_for_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def loop_in_c():
    print("hangs", flush=True)
    sum(itertools.repeat(0))

make_observable()
make_observable()
if sys.argv[1] == "c":
    loop_in_c()
threading.Thread(target=wait_for_lock).start()
print("hangs", flush=True)
"""


@pytest.fixture
def hanging(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen]:
    (tmp_path / "hanging.py").write_text(HANGING)
    command = [sys.executable, "hanging.py", request.param]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.getenv("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path, env=env) as process:
        try:
            assert process.stdout.readline() == b"hangs\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("hanging", ["c", "lock"], indirect=True)
def test_a_process_writes_its_stacks(hanging: subprocess.Popen):
    in_c = hanging.args[-1] == "c"
    wanted = "loop_in_c" if in_c else "wait_for_lock"

    def found() -> ThreadView | None:
        view = observe.observe(hanging.pid)
        assert not view.problem, view
        told = ProcessView.from_json(json.loads(json.dumps(dataclasses.asdict(view))))
        assert told == view
        return next((one for one in view.threads if wanted == one.frames[0].function), None)

    thread = wait_for(found, 10, wanted)
    assert thread.frames[0].text == ("sum(itertools.repeat(0))" if in_c else "lock.acquire()")
    assert (observe.observe(hanging.pid).busy >= BUSY) == in_c
    assert hanging.poll() is None


@pytest.mark.parametrize("hanging", ["lock"], indirect=True)
def test_a_stopped_process_and_one_that_is_gone(hanging: subprocess.Popen):
    hanging.send_signal(signal.SIGSTOP)
    view = wait_for(lambda: (v := observe.observe(hanging.pid)).state == "T" and v, 10, "its stop")
    assert view.problem == "a stopped process cannot write its stacks"
    hanging.kill()
    hanging.wait()
    assert observe.observe(hanging.pid) == ProcessView(hanging.pid)


def test_a_process_that_has_no_handler_gets_no_signal():
    """It would end by it."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        view = observe.observe(process.pid)
        assert "it does not write its stacks itself" in view.problem
        assert process.poll() is None
        process.kill()


def test_what_python_writes_is_read_in_all_versions():
    text = """Thread 0x00007f1c [Dask-Default] (most recent call first):
  File "/usr/lib/python3.14/threading.py", line 12 in wait
  File "<stdin>", line 3 in f

Current thread 0x00007f1d (most recent call first):
  <no Python frame>
"""
    first, second = read_written(text)
    assert (first.ident, list(map(str, first.frames))) == (
        0x7F1C,
        ["wait (lib/python3.14/threading.py:12)", "f (<stdin>:3)"],
    )
    assert (second.ident, second.frames) == (0x7F1D, [])


# Many of them, made up


def process(*frames: Frame, state: str = "S", busy: float = 0.0) -> ProcessView:
    outer = Frame("_run_task_simple", "site-packages/distributed/worker.py", 2829)
    threads = [ThreadView(7, [*frames, outer])] if frames else []
    return ProcessView(1, state, busy, busy, threads)


def worker(number: int, view: ProcessView, **told: Any) -> WorkerLook:
    running = {"7": f"f-{number}"} if view.threads else {}
    work = {"status": "running", "running": running, "seconds": {f"f-{number}": number}, **told}
    return WorkerLook(f"w{number}", f"n{number // 4}", view, work)


def report(reached: list[WorkerLook], /, **work: Any) -> Report:
    told = {
        "workers": {
            one.name: {
                "address": f"tls://{one.name}",
                "host": one.host,
                "status": "running",
                "silent_s": 1.0,
                "limit": 100,
                "processing": [],
                "seconds": {},
            }
            for one in reached
        },
        "states": {},
        "unrunnable": [],
        "waiting": {},
        "locks": {},
        "gangs": [],
        **work,
    }
    return Report("cluster.json", "n0", told, reached, {}, {})


def idle() -> ProcessView:
    """A control process whose event loop waits."""
    select = Frame("select", "lib/python3.11/selectors.py", 468)
    main = Frame("main", "clusters/detached/control.py", 226, "asyncio.run(_run(folder, request))")
    frames = [select, main, Frame("<module>", "clusters/detached/control.py", 240)]
    return ProcessView(1, "S", threads=[ThreadView(7, frames)])


HERE, THERE = Frame("meet", "me/a.py", 5, "barrier()"), Frame("load", "me/a.py", 9, "read()")


def test_a_thousand_workers_are_one_screen():
    many = [worker(number, process(HERE)) for number in range(990)]
    many += [worker(number, process(THERE)) for number in range(990, 1000)]
    seen = dataclasses.replace(
        report(many), unreached={f"worker x{n}": f"reason {n}" for n in range(100)}
    )
    assert [len(one.workers) for one in blocks(seen)] == [990, 10]
    text = list(lines(seen))
    assert len("\n".join(text).splitlines()) < 40
    assert "w3, w4 and 985 more): 990 Dask tasks, such as f-989 for 16m 29s" in str(text)


def stack(*frames: Frame) -> list[str]:
    """The lines that are shown of a worker's stack."""
    text = list(lines(report([worker(0, process(*frames))])))
    first = next(n for n, line in enumerate(text) if "Dask task f-0" in line) + 1
    return text[first : text.index("\nDask tasks: none")]


SYNC = Frame("sync", "site/distributed/utils.py", 2)


@pytest.mark.parametrize(
    ("inner", "gap"),
    [(8, []), (9, ["  … 1 line of Python and Dask"]), (10, ["  … 2 lines of Python and Dask"])],
)
def test_the_user_s_line_is_shown_below_any_number_of_dask_s(inner: int, gap: list[str]):
    shown = stack(*[SYNC] * inner, HERE, THERE)
    mine = "  meet (me/a.py:5)  barrier()"
    assert shown == [f"  {SYNC}"] * 8 + [*gap, mine, "  and 1 outer line"]


SCRIPT = """def work():
    return list(x for x in [1])

words = lambda: 2
"""


def test_functions_that_a_script_sends_have_its_name(tmp_path: Path):
    (tmp_path / "prog.py").write_text(SCRIPT)
    found = runpy.run_path(str(tmp_path / "prog.py"), run_name="sent")
    work, words = (cloudpickle.loads(cloudpickle.dumps(found[name])) for name in ("work", "words"))
    file = work.__code__.co_filename
    assert words.__code__.co_filename == file == NAMELESS
    there = [
        Frame("<genexpr>", file, 2),
        Frame("work", file, 2),
        Frame("<lambda>", file, 4),
    ]
    texts = ["return list(x for x in [1])"] * 2 + ["words = lambda: 2"]
    named = Script(str(tmp_path / "prog.py")).named(process(*there))
    told = [
        dataclasses.replace(one, file="prog.py", text=text)
        for one, text in zip(there, texts, strict=True)
    ]
    assert named.threads[0].frames[:3] == told


LOCK = Frame("acquire", "site-packages/distributed/lock.py", 84)
ROUND = {"a": {"waiting": 1, "held": 1}, "b": {"waiting": 1, "held": 1}}
CASES = {
    "locks in two orders": (
        report([worker(n, process(LOCK, HERE)) for n in (0, 1)], locks=ROUND),
        "at meet (me/a.py:5): barrier(). All that run wait, so each most likely holds what",
    ),
    "rank left": (
        report(
            [
                worker(n, process(HERE, Frame("call_rank", "hpcdask/client/gang.py", 1)))
                for n in (0, 1)
            ],
            gangs=[
                {
                    "size": 3,
                    "workers": ["w0", "w1", "w2"],
                    "arrived": [0, 1, 2],
                    "started": True,
                    "calling": [0, 1],
                }
            ],
        ),
        "rank 2 returned, and ranks 0, 1 still wait at meet (me/a.py:5): barrier()",
    ),
    "rank missing": (
        report(
            [],
            workers={"x": {"status": "running", "silent_s": 0, "limit": 1}},
            gangs=[
                {"size": 2, "workers": ["a", "b"], "arrived": [0], "started": False, "calling": []}
            ],
        ),
        "A gang of 2 waits at its start for rank 1 (worker b)",
    ),
    "no workers": (report([], workers={}), "The scheduler has no worker: see the queue"),
    "unrunnable": (
        report([worker(0, process())], unrunnable=["f-1"]),
        "No worker may run these Dask tasks: f-1",
    ),
    "full device": (
        report(
            [
                dataclasses.replace(
                    worker(0, process(THERE)),
                    gpu={"memory_used": 99, "memory_total": 100, "utilisation": 0},
                )
            ]
        ),
        "The GPU of worker w0 is full and idle",
    ),
    "an idle control process": (
        dataclasses.replace(report([worker(0, process())]), parts={CONTROL: idle()}),
        "No Dask task runs, and nothing is wrong here: the control process waits for work",
    ),
    "a notebook's own line": (
        dataclasses.replace(report([worker(0, process())]), parts={NOTEBOOK: process(HERE)}),
        "No Dask task runs: the notebook itself is at meet (me/a.py:5): barrier(), waiting",
    ),
    "gone": (report([worker(0, ProcessView(1))]), "Worker w0 is lost: there is no process"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_guess(case: str):
    seen, likely = CASES[case]
    assert likely in diagnose(seen)[0]


def test_a_name_that_nothing_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "runs"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(private, "node_folder", lambda name: str(folder))
    (folder / "77").symlink_to(tmp_path / "ended")
    with pytest.raises(UsageError, match="None is known here"):
        find(None, str(tmp_path))
    with pytest.raises(UsageError, match="no running cluster, run or scheduler file is called abc"):
        find("abc", str(tmp_path))
    with pytest.raises(UsageError, match="submit-train-0a1b2c is a job of hpcdask submit: its log"):
        find("submit-train-0a1b2c", str(tmp_path))
