"""The SLURM that the other tests stand on is a real one, and leaves nothing behind."""

from pathlib import Path

import pytest

from launching import wait_for
from slurm_site import SlurmSite

pytestmark = pytest.mark.slurm


def variable(env: str, name: str) -> list[str]:
    """Return the values of a variable in the output of several `env`."""
    return sorted(line.split("=", 1)[1] for line in env.splitlines() if line.startswith(f"{name}="))


def test_four_nodes_are_idle(slurm: SlurmSite):
    assert slurm.idle_nodes() == ["node1", "node2", "node3", "node4"]


def test_srun_starts_tasks_on_two_nodes(slurm: SlurmSite):
    env = slurm.run("srun", "-N2", "-n4", "env").stdout
    assert variable(env, "SLURM_PROCID") == ["0", "1", "2", "3"]
    assert len(set(variable(env, "SLURMD_NODENAME"))) == 2


def test_each_task_gets_its_own_gpu(slurm: SlurmSite):
    env = slurm.run("srun", "-N1", "-n2", "--gpus-per-task=1", "env").stdout
    assert variable(env, "CUDA_VISIBLE_DEVICES") == ["0", "1"]


def test_without_gpus_per_task_every_task_sees_all_gpus(slurm: SlurmSite):
    env = slurm.run("srun", "-N1", "-n2", "--gres=gpu:2", "env").stdout
    assert variable(env, "CUDA_VISIBLE_DEVICES") == ["0,1", "0,1"]


def test_no_more_gpus_than_there_are(slurm: SlurmSite):
    refused = slurm.run("srun", "-N1", "--gres=gpu:3", "true", check=False)
    assert refused.returncode
    assert "Requested node configuration is not available" in refused.stderr


def test_pmi2_is_there(slurm: SlurmSite):
    assert "pmi2" in slurm.run("srun", "--mpi=list").stdout
    env = slurm.run("srun", "--mpi=pmi2", "-n2", "env").stdout
    assert variable(env, "PMI_RANK") == ["0", "1"]


def test_a_job_runs_and_is_cancelled(slurm: SlurmSite, tmp_path: Path):
    job = slurm.submit("-N2", "--chdir", tmp_path, "--wrap", "srun -n2 sleep 600")
    slurm.wait_for_state(job, "RUNNING")
    assert len(slurm.idle_nodes()) == 2
    slurm.run("scancel", str(job))
    assert slurm.wait_for_state(job, "CANCELLED") == "CANCELLED"


def test_a_requeued_job_starts_again_under_its_id(slurm: SlurmSite, tmp_path: Path):
    script = 'echo "life ${SLURM_RESTART_COUNT:-0}" >> lives; exec sleep 600'
    job = slurm.submit("--requeue", "--chdir", tmp_path, "--wrap", script)
    lives = tmp_path / "lives"
    wait_for(lives.exists, 10, "the job's first life")
    slurm.run("scontrol", "requeue", str(job))
    wait_for(lambda: "life 1\n" in lives.read_text(), 40, "the job's second life")
    assert lives.read_text() == "life 0\nlife 1\n"
    assert slurm.state(job) == "RUNNING"
