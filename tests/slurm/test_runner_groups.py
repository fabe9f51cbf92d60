"""The runner in a heterogeneous job of a real SLURM."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launching import needs, stand_in_gpus, wait_for
from slurm_site import SlurmSite

pytestmark = pytest.mark.slurm

JOB = """#!/bin/bash
#SBATCH --nodes=1 --ntasks=2 --gpus-per-node=2 --mem=4000
#SBATCH hetjob
#SBATCH --nodes=2 --ntasks-per-node=2 --mem=6000
{environment}
srun --het-group=0,1 bash {rank} {python} -m hpcdask.run {options} {show}
echo over $?
"""
SHOW = """
from distributed import Client

with Client() as client:
    workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"].values()
    kinds = [kind for worker in workers for kind in worker["resources"]]
    print("kinds", kinds.count("GPU"), kinds.count("CPU"), flush=True)
"""
#: Only the first node has GPUs.
RANK = """test "$SLURM_NODEID" = 0 || unset FAKE_NVML
exec "$@"
"""


@pytest.mark.long
@needs("cuda")
def test_components_with_and_without_gpus(slurm: SlurmSite, tmp_path: Path) -> None:
    variables = {**stand_in_gpus(tmp_path, 2), "HOME": str(tmp_path)}
    for name, text in {"show.py": SHOW, "rank.sh": RANK}.items():
        (tmp_path / name).write_text(text)
    script = JOB.format(
        environment="\n".join(f"export {key}='{value}'" for key, value in variables.items()),
        python=sys.executable,
        rank=tmp_path / "rank.sh",
        options="--groups auto --rmm-pool-size 0 --device-memory-limit 0",
        show=tmp_path / "show.py",
    )
    (tmp_path / "job.sh").write_text(script)
    log = tmp_path / "log"
    log.touch()
    slurm.submit("-o", log, tmp_path / "job.sh", cwd=tmp_path)
    wait_for(lambda: "\nover " in f"\n{log.read_text()}", 60, "the job's end")
    lines = log.read_text().splitlines()
    assert "kinds 2 4" in lines, lines
    assert "over 0" in lines, lines
    (ready,) = [line for line in lines if "ready in" in line]
    assert "6 workers on 1 node (2 x Fake, 4 x CPU), tcp" in ready  # all nodes are this host
    assert any("4 ranks without a GPU on" in line for line in lines), lines
