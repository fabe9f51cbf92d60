"""An episode of each arena, always the same; `make chaos` plays others, for longer."""

from pathlib import Path

import pytest

from chaos.__main__ import chaos
from hpcdask.gpu.devices import visible_gpus
from hpcdask.gpu.driver import has_nvidia_driver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.mpi
def test_runs(tmp_path: Path):
    assert chaos("runner", seed=29, out=tmp_path, episodes=1) == 0


@pytest.mark.slurm
def test_job_clusters(tmp_path: Path):
    assert chaos("jobs", seed=1281, out=tmp_path, episodes=1) == 0


@pytest.mark.gpu
def test_gpus(tmp_path: Path):
    if not has_nvidia_driver() or not visible_gpus():
        pytest.skip("needs a CUDA GPU")
    assert chaos("gpu", seed=1, out=tmp_path, episodes=4) == 0
