"""An episode of each arena, always the same; `make chaos` plays others, for longer."""

import pytest

from chaos.__main__ import chaos
from hpcdask.gpu.devices import visible_gpus
from hpcdask.gpu.driver import has_nvidia_driver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.mpi
def test_runs():
    assert chaos("runner", seed=29, episodes=1) == 0


@pytest.mark.slurm
def test_job_clusters():
    assert chaos("jobs", seed=1281, episodes=1) == 0


@pytest.mark.gpu
def test_gpus():
    if not has_nvidia_driver() or not visible_gpus():
        pytest.skip("needs a CUDA GPU")
    assert chaos("gpu", seed=1, episodes=4) == 0
