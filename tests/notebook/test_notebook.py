"""The notebooks, executed cell by cell by a real kernel against a real SLURM."""

from __future__ import annotations

import html
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from jupyter_client.manager import start_new_kernel

import browser
from launching import run_cli, wait_for
from slurm_site import SlurmSite

if TYPE_CHECKING:
    import nbformat

pytestmark = [pytest.mark.slurm]

JOBSCRIPTS = Path(__file__).parents[2] / "jobscripts"
NOTEBOOKS = sorted(path.name for path in JOBSCRIPTS.glob("*.ipynb"))
JOB = {"cores": 1, "memory": "512MiB", "walltime": "00:10:00", "poll_interval": "1s"}
OPTIONS = {"device": "cpu", "gpus_per_job": 1, **JOB}
#: Of what a notebook shows, for docs; with HPCDASK_PICTURES set, the test takes it anew.
PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "cluster.png"
SIZE = (760, 245)
SEEN = """
const details = [...document.querySelectorAll('details')];
const jobs = details.find(d => d.querySelector('summary').innerText.startsWith('Jobs:'));
const before = jobs.querySelector('table').checkVisibility();
jobs.open = true;
const table = jobs.querySelector('table');
return {
  before,
  after: table.checkVisibility(),
  head: [...table.querySelectorAll('th')].map(cell => cell.innerText),
  rows: [...table.tBodies[0].rows].map(row => [...row.cells].map(cell => cell.innerText)),
  fits: document.body.scrollWidth <= innerWidth,
  text: document.body.innerText,
};
"""


def execute(notebook: nbformat.NotebookNode, where: dict) -> None:
    from nbclient import NotebookClient

    NotebookClient(notebook, timeout=600, startup_timeout=300).execute(**where)


def read(name: str, parameters: str) -> nbformat.NotebookNode:
    """Return a notebook of jobscripts with another content of the cell tagged ``parameters``."""
    import nbformat  # 8 s: its check of addresses compiles a grammar

    notebook = nbformat.read(JOBSCRIPTS / name, as_version=4)
    (tagged,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    tagged.source = parameters
    return notebook


def shown(notebook: nbformat.NotebookNode, cell_id: str, kind: str = "text/plain") -> str:
    """Return what this cell printed, or displayed in this form."""
    (cell,) = (cell for cell in notebook.cells if cell.id == cell_id)
    return "".join(
        output.text if output.output_type == "stream" else output.data.get(kind, "")
        for output in cell.outputs
    )


def jobs(site: SlurmSite) -> str:
    return site.run("squeue", "-h").stdout


def adaptive(chunks: int, side: int) -> nbformat.NotebookNode:
    parameters = f"options = {OPTIONS}\nmaximum = 3\nchunks, side = {chunks}, {side}"
    return read("adaptive.ipynb", parameters)


def states(table: str) -> set[str]:
    """The second column of a table of jobs."""
    head, *rows = table.splitlines()
    assert head.split()[:3] == ["job", "state", "reason"], table
    assert rows
    return {row.split()[1] for row in rows}


@pytest.mark.parametrize("name", NOTEBOOKS)
@pytest.mark.long
def test_it_is_kept_without_outputs(name: str):
    import nbformat

    notebook = nbformat.read(JOBSCRIPTS / name, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or (not cell.outputs and cell.execution_count is None)


def test_end_to_end(site: SlurmSite, where: dict, tmp_path: Path):
    notebook = adaptive(chunks=40, side=400)
    execute(notebook, where)

    script = shown(notebook, "script")
    assert "#SBATCH --gres=gpu:1\n" in script
    assert "-m hpcdask.worker --scheduler tls://" in script
    (kept,) = Path(where["cwd"]).glob(".hpcdask/*/script.sh")
    assert f"{kept.read_text()}\n" == script

    assert states(shown(notebook, "compute")) & {"starting", "running"}
    assert "<table>" in shown(notebook, "compute", "text/html")
    assert "SLURMCUDACluster(" in shown(notebook, "summary")
    summary = shown(notebook, "summary", "text/html")
    assert re.search(r"Dashboard:</strong> <a href=\"http://[^\"]+/status\"", summary)
    assert re.search(r"Jobs:</strong> .*[1-3] (starting|running)", summary)
    assert abs(float(shown(notebook, "result")) - 11) < 0.01
    assert states(shown(notebook, "idle")) <= {"completed", "cancelled"}
    assert not jobs(site)
    look_at(summary, tmp_path)


def look_at(summary: str, folder: Path) -> None:
    """What a notebook shows of a cluster, in a real browser, and the picture of it in docs."""
    seen = browser.look(folder, summary, SEEN)
    assert not seen["before"]
    assert seen["after"]
    assert seen["head"][:3] == ["job", "state", "reason"]
    assert 1 <= len(seen["rows"]) <= 3
    assert {row[1] for row in seen["rows"]} <= {"pending", "starting", "running"}
    assert seen["fits"]
    assert "SLURMCUDACluster" in seen["text"]
    assert "Dashboard: http://" in seen["text"]

    if os.environ.get("HPCDASK_PICTURES"):
        told = re.sub(r"//[\w.]+:(\d+)", r"//10.0.0.1:\1", summary)  # not this machine's
        body = told.replace("<details><summary><strong>Jobs", "<details open><summary><strong>Jobs")
        style = "<style>body {font: 13px sans-serif; margin: 12px} td, th {padding: 2px 12px 2px 0}"
        browser.photograph(folder, f"{style}</style>{body}", PICTURE, SIZE)


@pytest.mark.long
def test_genomics(site: SlurmSite, where: dict):
    parameters = (
        f"folder = {where['cwd']!r}\nshape, rows = (6_000, 300), 500\n"
        f"n_populations = 3\ndevice = 'cpu'\noptions = {JOB}\nworkers = 2"
    )
    notebook = read("genomics.ipynb", parameters)
    execute(notebook, where)
    assert "SLURMCUDACluster(" in shown(notebook, "cluster")
    kept, *_ = re.findall(r"([\d,]+) variants kept", shown(notebook, "structure"))
    assert 4_000 < int(kept.replace(",", "")) < 6_000
    assert shown(notebook, "check") == "np.float64(1.0)"
    drawn = shown(notebook, "plot", "application/javascript")
    assert "Variance along each axis" in drawn
    assert not re.search(r"<script[^>]+src=", html.unescape(shown(notebook, "plot", "text/html")))
    assert Path(where["cwd"], "genotypes.zarr", "zarr.json").exists()
    assert not jobs(site)


def test_a_notebook_comes_back_to_its_cluster(site: SlurmSite, where: dict):
    """Two runs of the notebook, one cluster: the second finds what the first has published."""
    job = ("--cores", "1", "--memory", "512MiB", "--walltime", "00:10:00")
    scheduler = '{"cores": 1, "memory": "512MiB"}'
    more = ("--device", "cpu", "--poll-interval", "1s", "--scheduler-job", scheduler)
    run_cli("up", "mine", "--system", "slurm", *job, *more, **where)
    parameters = 'name = "mine"\nmaximum = 2\nchunks, side = 20, 400\ndevice = "cpu"'
    for said in ("published\n", "an earlier run has published them\n"):
        notebook = read("attach.ipynb", parameters)
        execute(notebook, where)
        assert shown(notebook, "publish") == said
        assert abs(float(shown(notebook, "result")) - 11) < 0.01
        assert jobs(site)
    run_cli("down", "mine", **where)


@pytest.mark.long
def test_no_job_outlives_a_kernel_that_is_killed(site: SlurmSite, where: dict):
    """In the middle of the computation; the last cells never run."""
    notebook = adaptive(chunks=20_000, side=400)
    manager, client = start_new_kernel(startup_timeout=300, **where)
    try:
        for cell in notebook.cells:
            if cell.cell_type == "code":
                reply = client.execute_interactive(cell.source, timeout=600, output_hook=str)
                assert reply["content"]["status"] == "ok", reply
            if cell.id == "summary":
                break
        assert jobs(site)
        client.stop_channels()
        os.kill(manager.provisioner.pid, signal.SIGKILL)
        wait_for(lambda: not jobs(site), 30, "the queue to be empty", interval=0.2)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.context.destroy()
