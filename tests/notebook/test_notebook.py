"""The example notebook, executed cell by cell by a real kernel against a real SLURM."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

from launching import describe, end, leftovers, unavailable, wait_for, walk
from slurm_site import SlurmSite, missing_programs

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]

NOTEBOOK = Path(__file__).parents[2] / "jobscripts" / "adaptive.ipynb"
OPTIONS = {
    "device": "cpu",
    "gpus_per_job": 1,
    "cores": 1,
    "memory": "512MiB",
    "walltime": "00:10:00",
    "poll_interval": "1s",
}


class Desk:
    """Where the kernel runs: a login node's environment with a HOME of its own."""

    def __init__(self, site: SlurmSite) -> None:
        self.site = site
        self.home = Path(tempfile.mkdtemp(prefix="hn-", dir="/tmp"))
        self.marker = f"HPCDASK_TEST={uuid.uuid4().hex}"
        name, value = self.marker.split("=")
        folders = {"HOME": str(self.home), "IPYTHONDIR": str(self.home / "ipython")}
        self.env = {**site.env, **folders, name: value}

    def jobs(self) -> str:
        """The queue's own list of jobs."""
        return self.site.run("squeue", "-h").stdout

    def left(self) -> list[str]:
        keys = [str(path) for path in walk(self.home) if path.suffix == ".pem"]
        return [*self.jobs().splitlines(), *describe(leftovers(self.marker)).splitlines(), *keys]


@pytest.fixture(scope="module")
def site() -> Iterator[SlurmSite]:
    if missing := missing_programs():
        unavailable(f"SLURM is not installed, missing: {' '.join(missing)}")
    with SlurmSite(nodes=2) as site:
        yield site


@pytest.fixture
def desk(site: SlurmSite, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """At the end of the test no job, process or key may remain."""
    desk = Desk(site)
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(desk.home / "runtime"))
    try:
        yield desk
        try:
            wait_for(lambda: not desk.left(), 30, "all to be gone", interval=0.2)
        except AssertionError:
            pytest.fail("left behind:\n" + "\n".join(desk.left()))
    finally:
        site.cancel_all()
        end(leftovers(desk.marker))
        shutil.rmtree(desk.home, ignore_errors=True)


def read(chunks: int, side: int) -> nbformat.NotebookNode:
    """The notebook, with another content of the cell tagged ``parameters``."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    assert len(tagged) == 1
    tagged[0].source = f"options = {OPTIONS}\nmaximum = 3\nchunks, side = {chunks}, {side}"
    return notebook


def shown(notebook: nbformat.NotebookNode, cell_id: str, kind: str = "text/plain") -> str:
    """What this cell printed, or displayed in this form."""
    (cell,) = (cell for cell in notebook.cells if cell.id == cell_id)
    texts = [
        output.text if output.output_type == "stream" else output.data.get(kind, "")
        for output in cell.outputs
    ]
    return "".join(texts)


def states(table: str) -> set[str]:
    """The second column of a table of jobs."""
    head, *rows = table.splitlines()
    assert head.split()[:3] == ["job", "state", "reason"], table
    assert rows
    return {row.split()[1] for row in rows}


def test_it_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or (not cell.outputs and cell.execution_count is None)


def test_end_to_end(desk: Desk):
    notebook = read(chunks=40, side=400)
    client = NotebookClient(notebook, timeout=120, startup_timeout=60)
    client.execute(env=desk.env, cwd=str(desk.home))

    script = shown(notebook, "script")
    assert "#SBATCH --gres=gpu:1\n" in script
    assert "-m hpcdask.worker --scheduler tls://" in script
    (kept,) = desk.home.glob(".hpcdask/*/submissions/001/script.sh")
    assert f"{kept.read_text()}\n" == script

    assert states(shown(notebook, "compute")) & {"starting", "running"}
    assert "<table>" in shown(notebook, "compute", "text/html")
    assert "SLURMCUDACluster(" in shown(notebook, "summary")
    summary = shown(notebook, "summary", "text/html")
    assert re.search(r"Dashboard:</strong> <a href=\"http://[^\"]+/status\"", summary)
    assert re.search(r"Jobs:</strong> .*[1-3] (starting|running)", summary)
    assert abs(float(shown(notebook, "result")) - 11) < 0.01
    assert states(shown(notebook, "idle")) <= {"completed", "cancelled"}
    assert not desk.jobs()


@pytest.mark.parametrize("how", ["killed", "shut down"])
def test_no_job_outlives_the_kernel(desk: Desk, how: str):
    """In the middle of the computation; the last cells never run."""
    notebook = read(chunks=20_000, side=400)
    manager, client = start_new_kernel(startup_timeout=60, env=desk.env, cwd=str(desk.home))
    try:
        for cell in notebook.cells:
            if cell.cell_type == "code":
                reply = client.execute_interactive(cell.source, timeout=120, output_hook=str)
                assert reply["content"]["status"] == "ok", reply
            if cell.id == "summary":
                break
        assert desk.jobs()
        client.stop_channels()
        if how == "killed":
            os.kill(manager.provisioner.pid, signal.SIGKILL)
        else:
            manager.shutdown_kernel()
        wait_for(lambda: not desk.jobs(), 30, "the queue to be empty", interval=0.2)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.context.destroy()
