"""`hpcdask.Runner` and `hpcdask.initialize`: programs that every rank starts itself."""

from __future__ import annotations

import contextlib
import os
import signal

import dask
import psutil
import pytest
from distributed import Client

import hpcdask
from hpcdask.client.connect import configure_client, forget_client
from hpcdask.errors import UsageError
from running import PROGRAMS, Ended, Running, Site, under

pytestmark = pytest.mark.mpi
#: Has a rank execute itself once more, as which it must still know what it was told.
AGAIN = {"DASK_DISTRIBUTED__NANNY__PRE_SPAWN_ENVIRON": '{"MKL_NUM_THREADS": 2}'}


def start(site: Site, how: str, end: str, n: int = 2) -> Running:
    env = AGAIN if "mpi" in how else {}
    return site.popen("python", PROGRAMS / "embedded.py", how, end, n=n, env=env)


def run(site: Site, how: str, end: str, code: int | None = 0, n: int = 2) -> Ended:
    ended = start(site, how, end, n).end(40, code)
    site.check_nothing_left()
    return ended


@pytest.mark.parametrize(
    ("site", "how", "end"),
    [
        ("openmpi", "runner", "return"),
        pytest.param("openmpi", "runner-mpi", "exit", marks=pytest.mark.long),
        pytest.param("openmpi", "runner-thread", "return", marks=pytest.mark.long),
        pytest.param("openmpi", "initialize", "raise", marks=pytest.mark.long),
        ("mpich", "runner-mpi", "raise"),
        pytest.param("mpich", "initialize", "return", marks=pytest.mark.long),
        pytest.param("mpich", "initialize-mpi", "exit", marks=pytest.mark.long),
        ("alone", "runner", "shutdown"),
        pytest.param("alone", "initialize", "raise", marks=pytest.mark.long),
        pytest.param("alone", "initialize", "exit", marks=pytest.mark.long),
    ],
    indirect=["site"],
)
def test_rank_0_is_the_client_of_all_and_its_exit_code_the_run_s(
    site: Site, how: str, end: str
) -> None:
    codes = {"return": 0, "exit": 7, "raise": 1, "shutdown": 5}
    ended = run(site, how, end, codes[end])
    assert "TypeError" not in ended.err
    assert ended.out.count("workers") == 1, str(ended)
    assert "sum 6" in ended.out
    assert "hashes 1" in ended.out
    assert "hands on {''}" in ended.out, str(ended)
    if site.launcher.name != "no launcher":  # which starts as many as the machine has cores for
        assert "workers 2 " in ended.out
    if end == "return":
        assert not ended.foreign_lines, str(ended)
    if end == "raise":
        assert "ValueError: on purpose" in ended.err


@under("alone")
@pytest.mark.long
def test_the_end_of_a_runner_leaves_the_client_s_loop_free(site: Site) -> None:
    """Regression: the loop stood still until all ranks had ended."""
    ended = run(site, "runner-loop", "teardown", n=1)
    assert int(ended.out.split("turns ")[1].split()[0]) > 10, str(ended)


@under("alone")
def test_a_rank_that_is_killed_before_it_is_ready(site: Site) -> None:
    running = start(site, "runner", "return")
    running.wait_for(lambda: list(site.tmp.glob("hpcdask-*")), "the rank's folder")

    def is_rank(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):  # another may just have ended
            return "--attached" in process.cmdline() and process.ppid() == running.process.pid
        return False

    (rank,) = filter(is_rank, site.processes())
    rank.kill()
    ended = running.end(code=137)
    site.check_nothing_left()
    assert "hpcdask: error: this rank was killed by SIGKILL" in ended.err


def test_a_killed_program_leaves_nothing(site: Site) -> None:
    assert run(site, "runner", "kill", code=None).code != 0


@pytest.mark.parametrize(
    ("site", "end", "count"),
    [
        # Regression: a program with a pool ended 10 s late, as one that had lost its rank
        pytest.param("openmpi", "fork", 2, marks=pytest.mark.long),
        # Regression: a second Ctrl-C, however much later, ended the cluster of one at a prompt
        ("alone", "interrupts", 1),
    ],
    indirect=["site"],
)
def test_forks_and_interrupts_of_the_program_do_not_end_the_cluster(
    site: Site, end: str, count: int
) -> None:
    ended = run(site, "runner", end)
    assert ended.out.count("later sum 3") == count, str(ended)


@under("mpich")
@pytest.mark.long
def test_ctrl_c_does_not_end_the_other_ranks(site: Site) -> None:
    """MPICH's launcher passes it on to all of them."""
    running = start(site, "runner", "interrupted")
    running.line("ready")
    running.signal(signal.SIGINT)
    ended = running.end(40, code=0)
    assert "later sum 3" in ended.out, str(ended)
    assert "Traceback" not in ended.err, str(ended)
    site.check_nothing_left()


def test_nothing_leads_to_a_cluster_that_has_ended(monkeypatch) -> None:
    for name in ("HPCDASK_SCHEDULER_FILE", "DASK_SCHEDULER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    configure_client("tls://127.0.0.1:1", "/tmp/gone/scheduler.json")
    forget_client()
    assert dict(os.environ) == before
    assert dask.config.get("scheduler-address", None) is None
    with Client(processes=False, n_workers=1, dashboard_address=None) as client:
        assert client.submit(sum, [1, 2]).result() == 3


def test_an_option_that_does_not_exist() -> None:
    with pytest.raises(TypeError, match="nthread"):
        hpcdask.Runner(nthread=1)
    with pytest.raises(UsageError, match="does not take worker_class"):
        hpcdask.initialize(worker_class="dask_cuda.CUDAWorker")
