"""How a run ends: the program's exit code, soon, in silence, and with nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time

import pytest

from clock import PATIENCE
from hpcdask.client import scheduler_file
from hpcdask.process import SAME_SIGNAL_S, TERM_DEADLINE_S
from hpcdask.security.credentials import create_credentials
from running import PROGRAMS, Ended, Running, Site, under

pytestmark = pytest.mark.mpi
long = pytest.mark.long
#: Deadlines of an end are ten seconds or more: none of them was waited for.
SOON_S = 8


# The program ends


@pytest.mark.parametrize(
    ("site", "how", "code"),
    [
        ("openmpi", "return", 0),
        ("mpich", "exit-3", 3),
        ("alone", "shutdown", 1),  # and exits with a text
        pytest.param("alone", "exception", 1, marks=long),
        pytest.param("alone", "os-exit", 7, marks=long),  # and leaves a child
        pytest.param("mpich", "SIGKILL", 137, marks=long),
        pytest.param("alone", "task-runs", 0, marks=long),
    ],
    indirect=["site"],
)
def test_the_program_s_end_is_the_run_s_end(site: Site, how: str, code: int):
    ended = site.run("ends.py", how, n=1 if how in ("os-exit", "shutdown") else 2, code=code)
    assert ended.after_program_s < SOON_S, str(ended)
    site.check_nothing_left()
    assert not ended.errors, str(ended)
    if how == "exception":
        check_traceback(ended, "ValueError: the user's own error", "ends.py", 2)
    else:
        assert ended.foreign_lines == ["that is why"] * (how == "shutdown"), str(ended)


def check_traceback(ended: Ended, error: str, program: str, count: int) -> None:
    """Check that the traceback is the program's, and the last that is said."""
    lines = ended.foreign_lines
    assert lines[0] == "Traceback (most recent call last):", str(ended)
    assert lines[-1] == error, str(ended)
    frames = [line for line in lines if line.lstrip().startswith("File ")]
    assert len(frames) == count, str(ended)
    assert all(program in frame for frame in frames), str(ended)


# A signal ends the run


@under("openmpi", "mpich", "alone")
def test_sigterm_ends_everything(site: Site):
    run = site.start("waits.py")
    run.line("ready")
    run.signal(signal.SIGTERM)
    ended = run.end(code=143 if site.launcher.name == "no launcher" else None)
    site.check_nothing_left()
    assert ended.code != 0, str(ended)
    assert "Traceback" not in ended.err, str(ended)


@under("openmpi", "mpich")
def test_sigterm_while_the_cluster_comes_up(site: Site):
    run = site.start("waits.py")
    run.wait_for(site.files, "a first folder of the run")
    run.signal(signal.SIGTERM)
    ended = run.end()
    site.check_nothing_left()
    assert ended.code != 0, str(ended)
    assert "Traceback" not in ended.err, str(ended)


@under("alone")
@long
def test_an_interrupt_is_the_program_s_keyboardinterrupt(site: Site):
    run = site.start("waits.py")
    run.line("ready")
    run.signal(signal.SIGINT)
    ended = run.end(code=130)
    site.check_nothing_left()
    check_traceback(ended, "KeyboardInterrupt", "waits.py", 1)


@under("alone")
def test_control_c_on_a_terminal_is_one_interrupt_which_the_program_may_catch(site: Site):
    run = site.start("waits.py", "catch", terminal=True)
    run.line("ready")
    run.type("\x03")
    ended = run.end(code=5)
    site.check_nothing_left()
    assert not ended.foreign_lines, str(ended)


@pytest.mark.parametrize(
    ("site", "how", "number", "code"),
    [
        ("alone", "handler", signal.SIGTERM, 9),
        *((launcher, "usr1", signal.SIGUSR1, 4) for launcher in ("openmpi", "mpich")),
    ],
    indirect=["site"],
)
@long
def test_a_program_may_handle_a_signal(site: Site, how: str, number: int, code: int):
    run = site.start("waits.py", how)
    run.line("ready")
    run.signal(number)
    ended = run.end(code=code)
    line = "hpcdask: SIGTERM: the run ends, and the program has 25 s to end before it\n"
    assert ended.err.count(line) == (number == signal.SIGTERM), str(ended)
    site.check_nothing_left()
    assert not ended.foreign_lines, str(ended)


@under("alone")
@long
def test_a_second_signal_ends_it_at_once(site: Site):
    run = site.start("waits.py", "ignore")
    run.line("ready")
    run.signal(signal.SIGTERM)
    run.line("ignored")
    time.sleep(1.1 * SAME_SIGNAL_S)  # what comes together counts once
    assert run.process.poll() is None
    run.signal(signal.SIGTERM)
    assert "is killed" not in run.end(code=143).err
    site.check_nothing_left()


@long
@under("alone")
@pytest.mark.slow
def test_a_program_that_ignores_sigterm_is_killed_and_that_is_told(site: Site):
    run = site.start("waits.py", "ignore")
    run.line("ready")
    started = time.monotonic()
    run.signal(signal.SIGTERM)
    ended = run.end(40, code=143)
    assert time.monotonic() - started >= TERM_DEADLINE_S
    assert "hpcdask: the program did not end within 25 s, and is killed\n" in ended.err
    site.check_nothing_left()


# A worker, a rank, or the scheduler dies


def test_a_killed_worker_is_restarted_and_the_result_is_right(site: Site):
    ended = site.run("killed_worker.py")
    assert ended.told("result") == {
        "total": sum(x * x for x in range(40)),
        "workers": [2, 2, 2],
        "new": 1,
        "same after restart": 0,
        "hashes": 1,
    }
    site.check_nothing_left()
    assert "Traceback" not in ended.err, str(ended)
    # not those that the program restarts
    (replaced,) = [line for line in ended.err.splitlines() if "is replaced" in line]
    assert replaced.startswith("hpcdask: worker ")
    assert "was killed by SIGKILL, and is replaced" in replaced


FAILS = """
import os

def dask_setup(worker):
    if os.path.exists("PLACE/fail"):
        os._exit(7)
"""
KILLS = """
import os, signal, time
from distributed import Client
with Client() as client:
    pids = client.run(os.getpid).values()
    open("fail", "w").close()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    time.sleep(100)
"""


@under("openmpi")
def test_workers_that_never_start_again_end_the_run_once_none_is_left(site: Site):
    """Regression: rank 0 was not told, and the program waited for them."""
    preload = site.folder / "fails.py"
    preload.write_text(FAILS.replace("PLACE", str(site.folder)))
    run = site.start("--preload", preload, program=KILLS)
    first = run.line("hpcdask: a worker of rank", stream="err", timeout=90)
    assert "exit code 7" in first
    assert "1 worker" in first
    (error,) = run.end(60, code=1).errors
    assert "exit code 7" in error
    assert "--workers-min" not in error  # which would not help
    site.check_nothing_left()


@pytest.mark.parametrize(
    ("site", "who"), [("openmpi", 0), ("mpich", 1), ("openmpi", "scheduler")], indirect=["site"]
)
def test_a_killed_rank_or_scheduler_ends_the_run(site: Site, who: int | str):
    run = site.start("waits.py")
    ready = json.loads(run.line("ready"))
    os.kill(ready["scheduler"] if who == "scheduler" else run.rank_pids()[who], signal.SIGKILL)
    ended = run.end()
    site.check_nothing_left()
    assert ended.code not in (0, 2), str(ended)
    assert "Traceback" not in ended.err, str(ended)
    if who == "scheduler":
        (error,) = ended.errors
        assert "scheduler" in error


@under("openmpi", "alone")
def test_a_killed_launcher_or_runner_leaves_nothing(site: Site):
    """Open MPI's ranks live on without it."""
    run = site.start("waits.py")
    run.line("ready")
    run.signal(signal.SIGKILL)
    run.end(code=-signal.SIGKILL)
    site.check_nothing_left()


def test_a_launcher_that_is_killed_before_the_ranks_meet_leaves_nothing(site: Site):
    """Regression: a rank looked for its launcher only when the ranks had met."""
    # to write where nobody reads would end it
    run = site.start(program="import time; time.sleep(100)")
    run.wait_for(lambda: len(list(site.tmp.glob("hpcdask-*"))) >= 2, "the ranks' folders")
    run.signal(signal.SIGKILL)
    run.end(code=-signal.SIGKILL)
    site.check_nothing_left()


# No program: the cluster stays up


def start_server(site: Site) -> Running:
    run = site.start("--scheduler-file", "cluster.json")
    run.wait_for((site.folder / "cluster.json").exists, "the scheduler file")
    return run


def elsewhere(site: Site, *arguments: str) -> dict:
    """Return what a program on its own, with nothing but the scheduler file, prints."""
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "elsewhere.py"), "cluster.json", *arguments],
        cwd=site.folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 40,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@under("alone")
def test_a_short_program_removes_the_file_of_a_run_that_was_killed(site: Site):
    """Regression: a run that was over before its workers were up left that file and its keys."""
    file = site.folder / "cluster.json"
    scheduler_file.write(str(file), "tls://127.0.0.1:1", create_credentials(), job=None)
    site.run("--scheduler-file", "cluster.json", program="pass")
    assert not list(site.folder.glob("cluster.json*"))
    site.check_nothing_left()


@under("alone")
def test_a_cluster_for_others_serves_until_sigterm(site: Site):
    run = start_server(site)
    file, keys = site.folder / "cluster.json", site.folder / "cluster.json.keys"
    assert {stat.S_IMODE(path.stat().st_mode) for path in (file, keys)} == {0o600}
    tunnel = run.line("hpcdask: dashboard from your own machine", stream="err")
    address = run.line("hpcdask: scheduler at ", stream="err")
    ready = run.line("hpcdask: ", stream="err")
    assert json.loads(file.read_text())["address"] in address
    assert "hpcdask.connect" in address
    dashboard = re.search(r"dashboard (http://\S+)", ready)
    assert dashboard, ready
    port = dashboard[1].rsplit(":", 1)[1].partition("/")[0]
    assert re.search(rf"ssh -L {port}:\S+:{port} ", tunnel), tunnel

    assert elsewhere(site, dashboard[1]) == {
        "sum": 3,
        "bokeh before": False,
        "dashboard": 200,
        "bokeh after": True,
        "bokeh in workers": False,
    }
    run.signal(signal.SIGTERM)
    ended = run.end(code=143)
    site.check_nothing_left()
    assert not file.exists()
    assert not ended.foreign_lines, str(ended)


@long
def test_a_client_may_shut_a_cluster_down(site: Site):
    run = start_server(site)
    assert elsewhere(site, "shutdown")["sum"] == 3
    ended = run.end(code=0)
    site.check_nothing_left()
    assert not (site.folder / "cluster.json").exists()
    assert not ended.foreign_lines, str(ended)


@under("alone")
def test_nohup_keeps_a_cluster_up(site: Site):
    nohup = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
    nohup += "os.execvp(sys.argv[1], sys.argv[1:])"
    run = site.start(runner=["python", "-c", nohup, "python", "-m", "hpcdask.run"])
    run.line("hpcdask: dashboard", stream="err")
    run.signal(signal.SIGHUP)
    run.signal(signal.SIGTERM)
    run.end(code=128 + signal.SIGTERM)


# Over several nodes


@under("mpich")
def test_ranks_of_two_nodes_meet_by_mpi(site: Site):
    """Also where the user says that an import of mpi4py is not to start MPI."""
    site.launcher.prefix += ["-launcher", "fork", "-hosts", "a,b", "-ppn", "2"]
    ended = site.run("ends.py", "exit-3", n=3, env={"MPI4PY_RC_INITIALIZE": "0"}, code=3)
    assert "3 workers" in ended.err, str(ended)
    site.check_nothing_left()
    assert not ended.foreign_lines, str(ended)
