"""Notebooks at the login node of a SLURM of the tests: their kernels, what they show and leave."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launching import describe, end, leftovers, wait_for, walk
from slurm_site import SlurmSite

if TYPE_CHECKING:
    import nbformat

JOBSCRIPTS = Path(__file__).parents[1] / "jobscripts"


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
        """Jobs, processes and keys."""
        keys = [str(path) for path in walk(self.home) if path.name.endswith("keys")]
        return [*self.jobs().splitlines(), *describe(leftovers(self.marker)).splitlines(), *keys]


@contextmanager
def sit_down(site: SlurmSite, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """At the end no job, process or key may remain."""
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


def read(name: str, parameters: str) -> nbformat.NotebookNode:
    """A notebook of jobscripts, with another content of the cell tagged ``parameters``."""
    import nbformat  # 8 s: its check of addresses compiles a grammar

    notebook = nbformat.read(JOBSCRIPTS / name, as_version=4)
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    assert len(tagged) == 1
    tagged[0].source = parameters
    return notebook


def shown(notebook: nbformat.NotebookNode, cell_id: str, kind: str = "text/plain") -> str:
    """What this cell printed, or displayed in this form."""
    (cell,) = (cell for cell in notebook.cells if cell.id == cell_id)
    texts = [
        output.text if output.output_type == "stream" else output.data.get(kind, "")
        for output in cell.outputs
    ]
    return "".join(texts)
