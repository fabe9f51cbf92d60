"""Words that a cluster does not know, and sections of the configuration: before anything starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import dask
import pytest

import hpcdask
from hpcdask.errors import UsageError

JOB = {"cores": 8, "memory": "64GiB"}


def script(folder: Path, **keywords: Any) -> str:
    with hpcdask.SLURMCUDACluster(shared_temp_directory=str(folder), **keywords) as cluster:
        return cluster.job_script()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"gpus": 2}, "unknown keyword gpus: did you mean gpus_per_job?"),
        ({"partition": "gpu"}, "unknown keyword partition: did you mean queue?"),
        ({"wallltime": "1"}, "unknown keyword wallltime: did you mean walltime?"),
        ({"start_time_out": 1}, "unknown keyword start_time_out: did you mean start_timeout?"),
        ({"qqq": 1}, "unknown keyword qqq: There are account, "),
        ({"device": "gpu"}, "device: 'gpu' is not one of auto, cuda, cpu"),
        ({"memory_limit": "1kB"}, "memory_limit: '1kB' is 1,000 bytes"),
        ({"memory": 64}, "memory: 64 is 64 bytes, less than an idle worker has"),
        (
            {"memory": "1GB", "processes": 16, "cores": 16, "device": "cpu"},
            "the job's memory for each of its 16 workers on a node: 62500000 is 62,500,000",
        ),
        ({"interface": "ib7"}, "no interface ib7 with an IPv4 address. It has: lo"),
        ({"gpus_per_job": -1}, "gpus_per_job: -1 is not a whole number of at least 0"),
        ({"gpus_per_job": 0, "device": "cuda"}, "need at least one"),
        ({"worker_command": "dask_cuda.cli"}, "takes the place of dask_cuda.cli"),
        ({"nanny": False}, "every worker has a nanny"),
        (
            {"worker_extra_args": ["--colour", "red"]},
            "worker_extra_args: No such option '--colour'",
        ),
        ({"worker_extra_args": ["--name", "ann"]}, "named after their jobs"),
        ({"host": "10.0.0.1"}, "host: did you mean scheduler_options="),
        ({"cores": 0}, "cores: 0 is not a whole number"),
        ({"poll_interval": timedelta(0)}, "poll_interval: datetime.timedelta(0) is not a time"),
        ({"job_extra_directives": "--qos=x"}, "='--qos=x' is a text: give a list, ['--qos=x']"),
        ({"n_workers": -1}, "n_workers: -1 is not a whole number of at least 0"),
        ({"walltime": "soon"}, "walltime"),
        ({"walltime": 7200}, "walltime=7200 is a number, and queues differ in what that counts: "),
        ({"config_name": "slurm-x"}, "has no section jobqueue.slurm-x. It has: "),
        ({"config_name": "text"}, "has no section jobqueue.text. It has: "),
        ({"config_name": "empty"}, "has no section jobqueue.empty. It has: "),
    ],
)
def test_what_is_not_understood_is_told_with_what_may_be_meant(
    tmp_path: Path, keywords: dict, message: str
):
    with (
        dask.config.set({"jobqueue.text": "text", "jobqueue.empty": None}),
        pytest.raises(UsageError, match=re.escape(message)),
    ):
        script(tmp_path, **{**JOB, **keywords})
    assert not list(tmp_path.iterdir())


def test_a_runner_s_keywords_are_named_as_such():
    with pytest.raises(UsageError, match=r"^memory_limit: 0\.5 is not an amount of memory"):
        hpcdask.Runner(memory_limit=0.5)


def test_a_walltime_that_yaml_has_counted(tmp_path: Path):
    """02:00:00 without quotes is 7200 in YAML, which for SLURM is five days."""
    with dask.config.set({"jobqueue.slurm.walltime": 7200}):
        with pytest.raises(UsageError, match="in quotes in a YAML file too"):
            script(tmp_path, **JOB)
        assert "\n#SBATCH -t 02:00:00\n" in script(tmp_path, **JOB, walltime="02:00:00")


def test_a_section_needs_only_what_differs(tmp_path: Path):
    """Regression: a key that the section lacked was a KeyError."""
    mine = {"queue": "h200", "job-extra-directives": ["--qos=x"]}
    usual = {"jobqueue.slurm.account": "grp", "jobqueue.slurm.queue": "cpu"}
    with dask.config.set({"jobqueue.slurm-h200": mine, **usual}):
        text = script(tmp_path, **JOB, config_name="slurm-h200")
        assert dask.config.get("jobqueue.slurm-h200") == mine
    for line in ("-p h200", "-A grp", "--qos=x"):
        assert f"\n#SBATCH {line}\n" in text, text


def test_a_section_may_have_the_keywords_of_hpcdask(tmp_path: Path):
    """A site chooses how often its queue is asked, and how many jobs may die."""
    mine = {"poll-interval": "9s", "deaths-max": 3, "start-timeout": 60, "gpus-per-job": 2}
    with (
        dask.config.set({f"jobqueue.slurm.{name}": value for name, value in mine.items()}),
        hpcdask.SLURMCUDACluster(**JOB, shared_temp_directory=str(tmp_path), deaths_max=4) as made,
    ):
        policy = made.groups[""].policy
        assert made.controller.poll_interval_s == 9
        assert (policy.deaths_max, policy.start_timeout_s) == (4, 60)
        assert "--gres=gpu:2" in made.job_script()


FIRST_IN_A_BLOCK = """
import dask
from hpcdask.clusters.options import import_jobqueue

with dask.config.set({"jobqueue.slurm.walltime": "01:00:00"}):
    import_jobqueue("slurm")
import_jobqueue("slurm")
print(dask.config.get("jobqueue.slurm.walltime"), "python" in dask.config.get("jobqueue.slurm"))
"""


@pytest.mark.long
def test_a_first_cluster_inside_a_block_of_configuration(tmp_path):
    """Regression: the block's end removed dask-jobqueue's defaults."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_IN_A_BLOCK],
        env={**os.environ, "HOME": str(tmp_path), "DASK_CONFIG": str(tmp_path / "dask")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "00:30:00 True\n", done.stderr
