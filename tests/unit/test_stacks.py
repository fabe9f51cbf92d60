"""What is seen of a run: one process in two ways, a thousand workers on one screen, the guess."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from hpcdask.errors import UsageError
from hpcdask.jobs.detached import CONTROL, NOTEBOOK
from hpcdask.logs import plural
from hpcdask.node import observe
from hpcdask.node.observe import Frame, ProcessView, ThreadView, read_written
from hpcdask.security import private
from hpcdask.stacks.blocks import BUSY, blocks
from hpcdask.stacks.diagnose import diagnose
from hpcdask.stacks.look import NAMELESS, Report, WorkerLook, find, named
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
        told = ProcessView.from_json(json.loads(json.dumps(asdict(view))))
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
    work = {"status": "running", "running": running, "seconds": {f"f-{number}": number}}
    return replace(WorkerLook(f"w{number}", f"n{number // 4}", view, work), **told)


def report(
    *reached: WorkerLook, parts: dict[str, ProcessView] | None = None, **work: Any
) -> Report:
    known = {"host": "n0", "silent_s": 1.0, "processing": {}}
    told = {
        "workers": {one.name: known for one in reached},
        "states": {},
        "unrunnable": [],
        "waiting": {},
        **work,
    }
    return Report("cluster.json", told, list(reached), parts or {})


HERE, THERE = Frame("meet", "me/a.py", 5, "barrier()"), Frame("load", "me/a.py", 9, "read()")
SYNC = Frame("sync", "site/distributed/utils.py", 2)
LOCK = Frame("acquire", "site-packages/distributed/lock.py", 84)
RANK = Frame("call_rank", "hpcdask/client/gang.py", 1)
SELECT = Frame("select", "lib/python3.11/selectors.py", 468)
MAIN = Frame("<module>", "clusters/detached/control.py", 240)
WAITS = ProcessView(1, "S", threads=[ThreadView(7, [SELECT, MAIN])])


def test_a_thousand_workers_are_one_screen():
    many = [worker(number, process(HERE)) for number in range(990)]
    many += [worker(number, process(THERE)) for number in range(990, 1000)]
    seen = replace(report(*many), unreached={f"worker x{n}": f"reason {n}" for n in range(100)})
    assert [len(one.workers) for one in blocks(seen)] == [990, 10]
    text = "\n".join(lines(seen))
    assert len(text.splitlines()) < 40
    assert "w3, w4 and 985 more): 990 Dask tasks, such as f-989 for 16m 29s" in text


@pytest.mark.parametrize("inner", [8, 10])
def test_the_user_s_line_is_shown_below_any_number_of_dask_s(inner: int):
    text = list(lines(report(worker(0, process(*[SYNC] * inner, HERE, THERE)))))
    first = next(n for n, line in enumerate(text) if "Dask task f-0" in line) + 1
    shown = text[first : text.index("\nDask tasks: none")]
    rest = f"  and {plural(inner - 7, 'more line')}"
    assert shown == [f"  {SYNC}"] * 8 + ["  meet (me/a.py:5)  barrier()", rest]


SCRIPT = """def work():
    return list(x for x in [1])

words = lambda: 2
"""


def test_functions_that_a_script_sends_have_its_name(tmp_path: Path):
    (tmp_path / "prog.py").write_text(SCRIPT)
    found = runpy.run_path(str(tmp_path / "prog.py"), run_name="sent")
    sent = (cloudpickle.loads(cloudpickle.dumps(found[name])) for name in ("work", "words"))
    assert {function.__code__.co_filename for function in sent} == {NAMELESS}
    first, third = "return list(x for x in [1])", "words = lambda: 2"
    places = [("<genexpr>", 2, first), ("work", 2, first), ("<lambda>", 4, third)]
    there = process(*(Frame(name, NAMELESS, line) for name, line, _ in places))
    *mine, _ = named(there, str(tmp_path / "prog.py")).threads[0].frames
    assert mine == [Frame(name, "prog.py", line, text) for name, line, text in places]


def gang(arrived: list[int], calling: list[int]) -> dict[str, Any]:
    """A gang of three workers."""
    workers, started = ["w0", "w1", "w2"], len(arrived) == 3
    told = {"arrived": arrived, "started": started, "calling": calling}
    return {"gangs": [{"size": 3, "workers": workers, **told}]}


HELD = {"waiting": 1, "held": 1}
RANKS = [worker(n, process(HERE, RANK)) for n in (0, 1)]
CASES = {
    "locks in two orders": (
        report(*(worker(n, process(LOCK, HERE)) for n in (0, 1)), locks={"a": HELD, "b": HELD}),
        "at meet (me/a.py:5): barrier(). All that run wait, so each most likely holds what",
    ),
    "a rank left": (
        report(*RANKS, **gang([0, 1, 2], [0, 1])),
        "dead-lock: ranks 0-1 at meet (me/a.py:5): barrier(); rank 2 returned. Every rank",
    ),
    "a message is missing": (
        report(*RANKS, worker(2, process(HERE, RANK)), **gang([0, 1, 2], [0, 1, 2])),
        "A gang waits, and all are at the same line: ranks 0-2 at meet",
    ),
    "a rank is missing": (
        report(worker(3, process()), **gang([0, 2], [])),
        "A gang of 3 waits at its start for rank 1 (worker w1)",
    ),
    "no workers": (report(), "The scheduler has no worker: see the queue"),
    "unrunnable": (
        report(worker(0, process()), unrunnable=["f-1"]),
        "No worker may run these Dask tasks: f-1",
    ),
    "a full device": (
        report(
            worker(
                0,
                process(THERE),
                gpu={"memory_used": 99, "memory_total": 100, "utilisation": 0},
            )
        ),
        "The GPU of worker w0 is full and idle",
    ),
    "an idle control process": (
        report(worker(0, process()), parts={CONTROL: WAITS}),
        "No Dask task runs, and nothing is wrong here: the control process waits for work",
    ),
    "a notebook's own line": (
        report(worker(0, process()), parts={NOTEBOOK: process(HERE)}),
        "No Dask task runs: the notebook itself is at meet (me/a.py:5): barrier(), waiting",
    ),
    "gone": (report(worker(0, ProcessView(1))), "Worker w0 is lost: there is no process"),
    "a file system": (
        report(worker(0, process(THERE, state="D"), work={})),
        "Worker w0 is silent: the process waits for a file system or a driver",
    ),
    "a program that stopped": (
        report(worker(0, process()), parts={"program": process(state="T")}),
        "The program is stopped, by SIGSTOP, a debugger or a suspended job",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_guess(case: str):
    seen, likely = CASES[case]
    assert likely in diagnose(seen)[0]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        (None, "None is known here"),
        ("abc", "no running cluster, run or scheduler file is called abc"),
        ("submit-train-0a1b2c", "submit-train-0a1b2c is a job of hpcdask submit: its log"),
    ],
)
def test_a_name_that_nothing_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None, error: str
):
    monkeypatch.setattr(private, "node_folder", lambda name: str(tmp_path))
    (tmp_path / "77").symlink_to(tmp_path / "ended")
    with pytest.raises(UsageError, match=error):
        find(name, str(tmp_path / "clusters"))
