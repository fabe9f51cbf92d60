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

from clock import PATIENCE, clock
from hpcdask.process import SAME_SIGNAL_S, TERM_DEADLINE_S
from running import PROGRAMS, Ended, Running, Site

pytestmark = pytest.mark.mpi

ENDS = {
    "return": 0,
    "exit-3": 3,
    "exception": 1,
    "os-exit": 7,  # and leaves a child
    "SIGKILL": 137,
    "task-runs": 0,
    "shutdown": 1,  # and exits with a text
}


def under(*launchers: str):
    """Run the test under these launchers."""
    return pytest.mark.parametrize("site", launchers, indirect=True)


# The program ends


@pytest.mark.parametrize(
    ("site", "how"),
    [
        ("openmpi", "return"),
        ("mpich", "exit-3"),
        ("alone", "shutdown"),
        *(
            pytest.param(launcher, how, marks=pytest.mark.long)
            for launcher, how in [
                ("alone", "exception"),
                ("alone", "os-exit"),
                ("mpich", "SIGKILL"),
                ("alone", "task-runs"),
            ]
        ),
    ],
    indirect=["site"],
)
def test_the_program_s_end_is_the_run_s_end(site: Site, how: str):
    run = site.start("ends.py", how, n=1 if how in ("os-exit", "shutdown") else 2)
    run.line("ready")
    ended = run.end()
    assert ended.code == ENDS[how], str(ended)
    check_soon(ended)
    site.check_nothing_left(ended.program_end)
    assert not ended.errors, str(ended)
    if how == "exception":
        assert_traceback_is_the_user_s(ended)
    elif how == "shutdown":
        assert ended.foreign_lines == ["that is why"], str(ended)
    else:
        assert not ended.foreign_lines, str(ended)
        assert len(ended.err.splitlines()) == 1, str(ended)


def check_soon(ended: Ended, within: float = 3.0) -> None:
    """Fail unless the launcher returned soon after the program's end."""
    assert ended.program_end is not None, str(ended)
    assert ended.at - ended.program_end < within, str(ended)


def assert_traceback_is_the_user_s(ended: Ended) -> None:
    lines = ended.foreign_lines
    assert lines[0] == "Traceback (most recent call last):", str(ended)
    assert lines[-1] == ended.err.splitlines()[-1] == "ValueError: the user's own error", str(ended)
    frames = [line for line in lines if line.lstrip().startswith("File ")]
    assert len(frames) == 2, str(ended)
    assert all("ends.py" in frame for frame in frames), str(ended)


# A signal ends the run


@under("openmpi", "mpich", "alone")
def test_sigterm_ends_everything(site: Site):
    run = site.start("waits.py")
    run.line("ready")
    sent = run.signal(signal.SIGTERM)
    ended = run.end()
    site.check_nothing_left(sent)
    assert ended.code == 143 if site.launcher.name == "no launcher" else ended.code != 0, str(ended)
    assert "Traceback" not in ended.err, str(ended)


@under("openmpi", "mpich")
def test_sigterm_while_the_cluster_comes_up(site: Site):
    run = site.start("waits.py", "--timeout", "30")
    run.wait_for(site.files, "a first folder of the run")
    sent = run.signal(signal.SIGTERM)
    ended = run.end()
    site.check_nothing_left(sent)
    assert ended.code != 0, str(ended)
    assert "Traceback" not in ended.err, str(ended)


@under("alone")
@pytest.mark.long
def test_an_interrupt_is_the_program_s_keyboardinterrupt(site: Site):
    run = site.start("waits.py")
    run.line("ready")
    sent = run.signal(signal.SIGINT)
    ended = run.end()
    site.check_nothing_left(sent)
    assert ended.code == 130, str(ended)
    assert ended.err.splitlines()[-1] == "KeyboardInterrupt", str(ended)
    frames = [line for line in ended.foreign_lines if line.lstrip().startswith("File ")]
    assert len(frames) == 1, str(ended)
    assert "waits.py" in frames[0], str(ended)


@under("alone")
def test_control_c_on_a_terminal_is_one_interrupt_which_the_program_may_catch(site: Site):
    run = site.start("waits.py", "catch", terminal=True)
    run.line("ready")
    run.type("\x03")
    ended = run.end()
    assert ended.code == 5, str(ended)
    check_soon(ended)
    site.check_nothing_left(ended.program_end)
    assert not ended.foreign_lines, str(ended)


@under("alone")
@pytest.mark.long
def test_a_program_may_handle_sigterm(site: Site):
    run = site.start("waits.py", "handler")
    run.line("ready")
    run.signal(signal.SIGTERM)
    ended = run.end()
    assert ended.code == 9, str(ended)
    line = "hpcdask: SIGTERM: the run ends, and the program has 25 s to end before it\n"
    assert ended.err.count(line) == 1, str(ended)
    check_soon(ended)
    site.check_nothing_left(ended.program_end)
    assert not ended.foreign_lines, str(ended)


@under("alone")
@pytest.mark.long
def test_a_second_signal_ends_it_at_once(site: Site):
    run = site.start("waits.py", "ignore")
    run.line("ready")
    run.signal(signal.SIGTERM)
    run.line("ignored")
    time.sleep(1.1 * SAME_SIGNAL_S)  # what comes together counts once
    assert run.process.poll() is None
    sent = run.signal(signal.SIGTERM)
    ended = run.end()
    assert ended.code == 143, str(ended)
    site.check_nothing_left(sent)


@pytest.mark.long
@under("alone")
@pytest.mark.slow
def test_a_program_that_ignores_sigterm_is_killed_and_that_is_told(site: Site):
    run = site.start("waits.py", "ignore")
    run.line("ready")
    started, sent = time.monotonic(), run.signal(signal.SIGTERM)
    ended = run.end(40)
    assert ended.code == 143, str(ended)
    assert time.monotonic() - started >= TERM_DEADLINE_S
    assert ended.at - sent < 35
    assert "hpcdask: the program did not end within 25 s, and is killed\n" in ended.err
    site.check_nothing_left(ended.at)


@under("openmpi", "mpich")
@pytest.mark.long
def test_sigusr1_is_the_program_s_alone(site: Site):
    run = site.start("waits.py", "usr1")
    run.line("ready")
    run.signal(signal.SIGUSR1)
    ended = run.end()
    assert ended.code == 4, str(ended)
    check_soon(ended)
    site.check_nothing_left(ended.program_end)
    assert not ended.foreign_lines, str(ended)


# A worker dies


def test_a_killed_worker_is_restarted_and_the_result_is_right(site: Site):
    ended = site.run("killed_worker.py", timeout=60)
    assert ended.code == 0, str(ended)
    assert json.loads(result_of(ended)) == {
        "total": sum(x * x for x in range(40)),
        "workers": [2, 2, 2],
        "new": 1,
        "same after restart": 0,
        "hashes": 1,
    }
    check_soon(ended)
    site.check_nothing_left(ended.program_end)
    assert "Traceback" not in ended.err, str(ended)
    replaced = [line for line in ended.err.splitlines() if "is replaced" in line]
    assert len(replaced) == 1, str(ended)  # not those that the program restarts
    assert replaced[0].startswith("hpcdask: worker ")
    assert "was killed by SIGKILL, and is replaced" in replaced[0]


def result_of(ended: Ended) -> str:
    found = re.search("^result (.*)$", ended.out, re.MULTILINE)
    assert found, str(ended)
    return found[1]


# A rank, or the scheduler, dies


@pytest.mark.parametrize(("site", "rank"), [("openmpi", 0), ("mpich", 1)], indirect=["site"])
def test_a_killed_rank_ends_the_run(site: Site, rank: int):
    run = site.start("waits.py")
    run.line("ready")
    killed = kill(run.rank_pids()[rank])
    ended = run.end()
    site.check_nothing_left(killed, within=10)
    assert ended.code != 0, str(ended)
    assert "Traceback" not in ended.err, str(ended)


def test_a_killed_scheduler_ends_the_run_with_a_line_that_says_so(site: Site):
    run = site.start("waits.py")
    killed = kill(json.loads(run.line("ready"))["scheduler"])
    ended = run.end()
    site.check_nothing_left(killed, within=10)
    assert ended.code not in (0, 2), str(ended)
    assert len(ended.errors) == 1, str(ended)
    assert "scheduler" in ended.errors[0], str(ended)
    assert "Traceback" not in ended.err, str(ended)


@under("openmpi", "alone")
def test_a_killed_launcher_or_runner_leaves_nothing(site: Site):
    """Open MPI's ranks live on without it."""
    run = site.start("waits.py")
    run.line("ready")
    killed = run.signal(signal.SIGKILL)
    ended = run.end()
    assert ended.code == -signal.SIGKILL
    site.check_nothing_left(killed)


@under("openmpi")
def test_a_launcher_that_is_killed_before_the_ranks_meet_leaves_nothing(site: Site):
    """Regression: a rank looked for its launcher only when the ranks had met."""
    (site.folder / "silent.py").write_text("import time; time.sleep(100)")
    # to write where nobody reads would end it
    run = site.start("silent.py", find=False)
    run.wait_for(lambda: len(list(site.tmp.glob("hpcdask-*"))) >= 2, "the ranks' folders")
    killed = run.signal(signal.SIGKILL)
    ended = run.end()
    assert ended.code == -signal.SIGKILL
    site.check_nothing_left(killed, within=8)


def kill(pid: int) -> float:
    now = clock()
    os.kill(pid, signal.SIGKILL)
    return now


# No program: the cluster stays up


def start_server(site: Site, **kwargs) -> Running:
    run = site.start("--scheduler-file", "cluster.json", **kwargs)
    run.wait_for((site.folder / "cluster.json").exists, "the scheduler file")
    return run


def elsewhere(site: Site, *arguments: str) -> dict:
    """What a program on its own, with nothing but the scheduler file, prints."""
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
def test_a_cluster_for_others_serves_until_sigterm(site: Site):
    run = start_server(site)
    file, keys = site.folder / "cluster.json", site.folder / "cluster.json.keys"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    content = json.loads(file.read_text())
    tunnel = run.line("hpcdask: dashboard from your own machine", stream="err")
    address = run.line("hpcdask: scheduler at ", stream="err")
    ready = run.line("hpcdask: ", stream="err")
    dashboard = re.search(r"dashboard (http://\S+)", ready)
    assert content["address"] in address
    assert "hpcdask.connect" in address
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
    sent = run.signal(signal.SIGTERM)
    ended = run.end()
    assert ended.code == 143, str(ended)
    site.check_nothing_left(sent)
    assert not file.exists()
    assert not keys.exists()
    assert not ended.foreign_lines, str(ended)


@pytest.mark.long
def test_a_client_may_shut_a_cluster_down(site: Site):
    run = start_server(site)
    assert elsewhere(site, "shutdown")["sum"] == 3
    ended = run.end()
    assert ended.code == 0, str(ended)
    site.check_nothing_left(ended.at)
    assert not (site.folder / "cluster.json").exists()
    assert not ended.foreign_lines, str(ended)


# Over several nodes


def test_ranks_of_two_nodes_meet_by_mpi(mpich):
    """Also where the user says that an import of mpi4py is not to start MPI."""
    mpich.prefix += ["-launcher", "fork", "-hosts", "a,b", "-ppn", "2"]
    with Site(mpich) as site:
        ended = site.run("ends.py", "exit-3", n=3, env={"MPI4PY_RC_INITIALIZE": "0"})
        assert ended.code == 3, str(ended)
        assert "3 workers" in ended.err, str(ended)
        check_soon(ended)
        site.check_nothing_left(ended.program_end)
        assert not ended.foreign_lines, str(ended)


@under("alone")
def test_nohup_keeps_a_cluster_up(site: Site):
    nohup = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
    nohup += "os.execvp(sys.argv[1], sys.argv[1:])"
    command = ["python", "-m", "hpcdask.run", "--device", "cpu"]
    process = site.launcher.popen(1, "python", "-c", nohup, *command, env=site.env, cwd=site.folder)
    running = Running(site, process)
    site.runs.append(running)
    running.line("hpcdask: dashboard", stream="err")
    running.signal(signal.SIGHUP)
    running.signal(signal.SIGTERM)
    assert running.end().code == 128 + signal.SIGTERM
