"""What a run, a job and a cluster take of configuration and folders that others may write."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from strangers import put_modules

pytestmark = pytest.mark.mpi
WORKER = ["-m", "hpcdask.worker", "--scheduler", "tcp://127.0.0.1:1", "--cluster", "a-b-c"]
HOST = os.uname().nodename
CLUSTER = "import hpcdask; hpcdask.LocalCUDAJobCluster(1, device='cpu', cores=1, memory='1GiB')"


@pytest.mark.parametrize(
    ("command", "start", "code"),
    [
        (["-m", "hpcdask.run", "--device", "cpu", "program.py"], "hpcdask: error: ", 2),
        ([*WORKER, "--workers", "1", "--device", "cpu"], f"hpcdask: error: job 7 on {HOST}: ", 2),
        (["-c", CLUSTER], "hpcdask.errors.UsageError: ", 1),
    ],
    ids=["run", "job", "cluster"],
)
def test_a_configuration_of_others_is_refused_before_it_is_obeyed(tmp_path, command, start, code):
    config = tmp_path / "dask"
    config.mkdir()
    (config / "x.yaml").write_text(f"distributed:\n  scheduler:\n    preload: [{tmp_path}/own.py]")
    (config / "x.yaml").chmod(0o666)
    (tmp_path / "own.py").write_text(f"open('{tmp_path}/owned', 'w')")
    (tmp_path / "program.py").write_text("print('ran')")
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "DASK_CONFIG": str(config), "HPCDASK_JOB_ID": "7"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert f"{start}others may write {config}/x.yaml" in done.stderr, done
    assert done.returncode == code
    assert not (tmp_path / "owned").exists()
    assert not done.stdout


PROGRAM = """
from contextlib import nullcontext
from distributed import Client
from hpcdask import Runner

def answer():
    import {beside}
    return {beside}.ANSWER

with Runner(device="cpu", tls=False) if "{how}" == "runner" else nullcontext():
    with Client() as client:
        print(client.submit(answer).result(), flush=True)
"""


@pytest.mark.parametrize("how", ["run", pytest.param("runner", marks=pytest.mark.long)])
def test_a_run_takes_nothing_from_the_current_folder_that_is_installed(tmp_path, how):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    put_modules(here, "distributed", "yaml", "click", "multiprocessing")
    elsewhere.mkdir()
    (here / "only_here.py").write_text("ANSWER = 42")
    (elsewhere / "beside.py").write_text("ANSWER = 42")
    beside = "beside" if how == "run" else "only_here"
    program = elsewhere / "program.py"
    program.write_text(PROGRAM.format(how=how, beside=beside))
    options = ["-m", "hpcdask.run", "--device", "cpu", "--no-tls"] if how == "run" else []
    done = subprocess.run(
        [sys.executable, *options, str(program)],
        env={**os.environ, "OWNED": str(tmp_path / "owned"), "TMPDIR": "/tmp"},
        cwd=here,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == "42\n", done.stderr
    assert not (tmp_path / "owned").exists()
    assert "hpcdask: warning: --no-tls: any user who reaches a port of this run" in done.stderr
