"""One SLURM for the tests of this folder, and its login node, where kernels run."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launching import unavailable, wait_for, walk
from slurm_site import SlurmSite, missing_programs


@pytest.fixture(scope="session")
def site() -> Iterator[SlurmSite]:
    """A SLURM of two nodes with two stand-in GPUs each."""
    if missing := missing_programs():
        unavailable(f"SLURM is not installed, missing: {' '.join(missing)}")
    with SlurmSite(nodes=2) as site:
        yield site


@pytest.fixture
def where(site: SlurmSite, marker: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict]:
    """Environment and folder of a kernel; at the end no job, process or key may remain."""
    home = tempfile.mkdtemp(prefix="hn-", dir="/tmp")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", f"{home}/runtime")
    own = {"HOME": home, "IPYTHONDIR": f"{home}/ipython"}
    yield {"env": {**site.env, **own, **dict([marker.split("=")])}, "cwd": home}

    def left() -> list[str]:
        keys = [str(path) for path in walk(Path(home)) if path.name.endswith("keys")]
        return [*site.run("squeue", "-h").stdout.splitlines(), *keys]

    try:
        wait_for(lambda: not left(), 30, "jobs and keys to be gone", interval=0.2)
    finally:
        shutil.rmtree(home, ignore_errors=True)
