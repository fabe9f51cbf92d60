"""The SLURM that the other tests stand on is a real one, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from clock import PATIENCE
from launching import leftovers, name_of, wait_for
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


def test_cancel_all_ends_what_ignores_sigterm(slurm: SlurmSite, tmp_path: Path):
    program = "trap '' TERM; while :; do sleep 0.1; done"
    jobs = [slurm.submit("--chdir", tmp_path, "--wrap", program) for _ in range(2)]
    jobs.append(slurm.submit("--hold", "--chdir", tmp_path, "--wrap", "true"))
    for job in jobs[:2]:
        slurm.wait_for_state(job, "RUNNING")
    slurm.cancel_all()
    assert not slurm.run("squeue", "-h").stdout


@pytest.mark.usefixtures("slurm_programs")
def test_two_sites_run_at_once_and_leave_nothing(tmp_path: Path):
    escape = "setsid sleep 600 & sleep 600"
    with SlurmSite(nodes=1) as one, SlurmSite(nodes=2, gpus_per_node=4, cpus_per_node=64) as two:
        folders = [one.folder, two.folder]
        markers = [one.marker, two.marker]
        assert (one.idle_nodes(), two.idle_nodes()) == (["node1"], ["node1", "node2"])
        per_task = ("--cpus-per-task=16", "--gpus-per-task=1")
        env = two.run("srun", "-N2", "-n8", *per_task, "env").stdout
        assert variable(env, "CUDA_VISIBLE_DEVICES") == [*"00112233"]
        for site in (one, two):
            job = site.submit("--chdir", tmp_path, "--wrap", escape)
            site.wait_for_state(job, "RUNNING")
            wait_for(lambda site=site: len(sleepers(site.marker)) == 2, 10, "the job's processes")
    assert not any(folder.exists() for folder in folders)
    assert not any(leftovers(marker) for marker in markers)
    commands = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if any(str(f) in command for f in folders)]


def sleepers(marker: str) -> list[psutil.Process]:
    return [process for process in leftovers(marker) if name_of(process) == "sleep"]


@pytest.mark.usefixtures("slurm_programs")
def test_a_site_that_cannot_start_says_why_and_leaves_nothing():
    site = SlurmSite(nodes=1, conf={"SelectType": "select/none_such"})
    with pytest.raises(RuntimeError, match=r"(?s)slurmctld.*select/none_such"), site:
        pass
    assert not leftovers(site.marker)
    assert not Path(site.marker.partition("=")[2]).parent.exists()


SITE = [sys.executable, Path(__file__).parents[1] / "slurm_site.py"]


@pytest.mark.usefixtures("slurm_programs")
def test_the_site_as_a_program_runs_a_command_in_it_and_leaves_nothing():
    script = "echo $SLURM_CONF; srun -N2 sh -c 'echo $SLURMD_NODENAME'; sleep 600 & exit 3"
    done = subprocess.run(
        [*SITE, "sh", "-c", script], capture_output=True, text=True, timeout=60 * PATIENCE
    )
    conf, *nodes = done.stdout.split()
    assert (sorted(nodes), done.returncode) == (["node1", "node2"], 3), done.stderr
    assert not leftovers(f"SLURM_CONF={conf}")
    assert not Path(conf).parent.exists()


@pytest.mark.usefixtures("slurm_programs")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_site_as_a_program_goes_when_it_gets_a_signal(number: signal.Signals):
    shell = "echo $SLURM_CONF; exec sleep 600"  # of a user, whose terminal closes
    with subprocess.Popen(
        SITE, env={**os.environ, "SHELL": "/bin/sh"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as site:
        site.stdin.write(f"{shell}\n".encode())
        site.stdin.flush()
        conf = site.stdout.readline().decode().strip()
        assert leftovers(f"SLURM_CONF={conf}")
        site.send_signal(number)
        assert site.wait(60 * PATIENCE) == 130
    assert not leftovers(f"SLURM_CONF={conf}")
    assert not Path(conf).parent.exists()
