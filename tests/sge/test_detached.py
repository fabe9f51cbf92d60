"""Detached clusters on a real Grid Engine: a killed notebook, the idle end, `hpcdask down`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import hpcdask
from hpcdask.errors import ClusterError
from hpcdask.jobs import detached
from hpcdask.queues.sge import SgeQueue
from launching import wait_for, walk
from sge_site import SgeSite

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[1] / "jobs" / "attached.py"


@pytest.fixture
def base(sge: SgeSite, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where clusters keep their files, for a user of the site."""
    for name, value in sge.env.items():
        if name != "HOME":  # the test's own
            monkeypatch.setenv(name, value)
    return tmp_path / "clusters"


def make(base: Path, **keywords) -> hpcdask.SGECUDACluster:
    return hpcdask.SGECUDACluster(
        name="mine",
        detached=True,
        device="cpu",
        cores=1,
        memory="500MB",
        poll_interval=0.5,
        shared_temp_directory=str(base),
        **keywords,
    )


def all_gone(base: Path) -> bool:
    keys = [path for path in walk(base) if path.suffix in (".pem", ".pickle")]
    return not keys and not asyncio.run(SgeQueue().tagged())


def test_a_killed_notebook_and_down(base: Path, tmp_path: Path):
    ran = tmp_path / "ran"
    ran.mkdir()
    make(base, n_workers=2).close()
    command = [sys.executable, PROGRAM, "mine"]
    notebook = subprocess.Popen([*command, ran, "200"], stdout=subprocess.PIPE, text=True)
    assert notebook.stdout.readline() == "computes\n"
    wait_for(lambda: len(list(ran.iterdir())) > 20, 60, "some to be done")
    notebook.kill()
    notebook.communicate()
    with hpcdask.attach("mine") as cluster, cluster.get_client() as client:
        results = client.gather(client.get_dataset("work"))
        assert results == [number * number for number in range(200)]
        assert {path.read_text() for path in ran.iterdir()} == {"x"}
        assert len(cluster.jobs()) == 2
    down = [sys.executable, "-m", "hpcdask.cli", "down", "mine"]
    done = subprocess.run(down, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    wait_for(lambda: all_gone(base), 30, "all to be gone")


@pytest.mark.long
def test_nobody_uses_it(base: Path):
    make(base, n_workers=1, idle_timeout="2s").close()
    wait_for(lambda: detached.find("mine").ended, 60, "its end")
    wait_for(lambda: all_gone(base), 30, "all to be gone")
    with pytest.raises(ClusterError, match="nobody used it for 2 s"):
        hpcdask.attach("mine")
