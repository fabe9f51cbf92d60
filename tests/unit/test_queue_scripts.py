"""Golden job scripts: what each queueing system is asked for, word by word.

Names and folders hold spaces, quotes and `;`. The manual that each line was checked against is
named in its test; SLURM's, Grid Engine's and OAR's scripts also run in real ones.
"""

import os
import subprocess
from datetime import timedelta
from typing import Any

import dask
import pytest
from hypothesis import given, settings, strategies

from doors import TAG, make_job, preamble
from hpcdask.clusters.keywords import job_keywords
from hpcdask.clusters.options import JobOptions, import_jobqueue, read_job_options
from hpcdask.clusters.scaling import wishes
from hpcdask.errors import UsageError
from hpcdask.queues.base import Queue, Request
from hpcdask.queues.registry import queue_class
from hpcdask.queues.slurm import GpuRequest, SlurmQueue

FOLDER = "/home/ann/my runs; 1/logs"
ODD_FOLDER = """/home/ann/it's "old"; $1/logs"""
WORKER = "exec python -m hpcdask.worker --workers 2"
PROLOGUE = ['module load "my env"; echo $HOME']


def script(kind: str, folder: str = FOLDER, of: Queue | None = None, **keywords: Any) -> str:
    """The job script of a system for a job of 8 cores and 2 GPUs."""
    asked = {
        "gpus": 2,
        **{k: keywords.pop(k) for k in ("gpus", "gpu_type", "nodes") if k in keywords},
    }
    name = keywords.setdefault("job_name", "it's my; job")
    job = make_job(kind, cores=8, memory="64GiB", **{"job_script_prologue": PROLOGUE, **keywords})
    queue = of or door(kind)
    request = Request(name=name, tag=TAG, folder=folder, **asked)
    return queue.script(job, request, preamble(queue), WORKER)


def door(kind: str) -> Queue:
    return queue_class(kind.lower())()


def directives(kind: str, **keywords: Any) -> list[str]:
    """The directives of a script."""
    prefix = f"{door(kind).prefix} "
    lines = script(kind, **keywords).splitlines()
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


#: Jobs of each system, with the manual that the lines between first and prologue were checked with.
GOLDEN: dict[str, tuple[dict[str, Any], str]] = {
    # SLURM: sbatch(1), -J, -p, -A, --gres, --comment, --output with %A and %a.
    "SLURM": (
        {"folder": ODD_FOLDER, "queue": "gpu", "account": "my account", "gpu_type": "a100"},
        """\
#SBATCH -J "it's my; job"
#SBATCH -p gpu
#SBATCH -A "my account"
#SBATCH -n 1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH -t 00:30:00
#SBATCH --gres=gpu:a100:2
#SBATCH --comment=hpcdask:ab12cd34
#SBATCH --output="/home/ann/it's \\"old\\"; $1/logs/queue-%A_%a.log"

export HPCDASK_JOB_ID=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+\
_$SLURM_ARRAY_TASK_ID} HPCDASK_RESTARTS=${SLURM_RESTART_COUNT:-0}
""",
    ),
    # PBS Professional: qsub(1B), "Requesting Resources" (select, ngpus), -N, -A, -v, -j, -o, -W.
    # The reader of directives joins adjacent quoted pieces, as a shell does.
    "PBS": (
        {"folder": ODD_FOLDER, "queue": "gpu", "account": "my account", "gpu_type": "A100"},
        """\
#PBS -N it_s_my__job
#PBS -q gpu
#PBS -A 'my account'
#PBS -l select=1:ncpus=8:mem=64GB:ngpus=2:gpu_type=A100
#PBS -l walltime=00:30:00
#PBS -v HPCDASK_TAG=hpcdask:ab12cd34
#PBS -j oe
#PBS -o '/home/ann/it'"'"'s "old"; $1/logs/'
#PBS -W umask=077

[ ! -e '/home/ann/it'"'"'s "old"; $1/logs'/"$PBS_JOBID".log ] || exit 75  # \
started before: the cluster replaces this job
export HPCDASK_JOB_ID="$PBS_JOBID" HPCDASK_RESTARTS=0
""",
    ),
    # Son of Grid Engine: sge_submit(1), -l, -ac, -r, -o with $JOB_ID and $TASK_ID, -S.
    "SGE": (
        {"queue": "gpu.q", "project": "my project", "resource_spec": "h_vmem=8G"},
        """\
#$ -N it_s_my__job
#$ -q gpu.q
#$ -P "my project"
#$ -l h_vmem=8G
#$ -l h_rt=00:30:00
#$ -cwd
#$ -j y
#$ -l gpu=2
#$ -ac HPCDASK_TAG=hpcdask:ab12cd34
#$ -r n
#$ -o "/home/ann/my runs; 1/logs/queue-$JOB_ID.$TASK_ID.log"
#$ -S /bin/bash

export HPCDASK_JOB_ID="$JOB_ID$([ "${SGE_TASK_ID:-undefined}" = undefined ] || echo \
".$SGE_TASK_ID")" HPCDASK_RESTARTS=0
""",
    ),
    # IBM Spectrum LSF 10.1: bsub(1), -J (its characters under "Job Arrays"), -gpu (num, gmodel),
    # -Jd, -rn, -o with %J and %I; embedded options with spaces are in double quotes.
    "LSF": (
        {
            "queue": "gpu",
            "project": "my project",
            "lsf_units": "mb",
            "gpu_type": "NVIDIAA100_SXM4_80GB",
        },
        """\
#BSUB -J it_s_my__job
#BSUB -q gpu
#BSUB -P "my project"
#BSUB -n 8
#BSUB -R "span[hosts=1]"
#BSUB -M 68720
#BSUB -W 00:30
#BSUB -gpu "num=2:gmodel=NVIDIAA100_SXM4_80GB"
#BSUB -Jd "hpcdask:ab12cd34"
#BSUB -rn
#BSUB -o "/home/ann/my runs; 1/logs/queue-%J.%I.log"

[ ! -e '/home/ann/my runs; 1/logs'/"$LSB_JOBID$([ "${LSB_JOBINDEX:-0}" = 0 ] || echo \
"[$LSB_JOBINDEX]")".log ] || exit 75  # started before: the cluster replaces this job
export HPCDASK_JOB_ID="$LSB_JOBID$([ "${LSB_JOBINDEX:-0}" = 0 ] || echo "[$LSB_JOBINDEX]")" \
HPCDASK_RESTARTS=0
""",
    ),
    # OAR 2.5: oarsub(1), -n, -l with a property in braces and its hierarchy, -p, -O with %jobid%.
    # The lines become arguments, split like shell words. IO.pm refuses a ; in the name of output.
    "OAR": (
        {
            "queue": "gpu",
            "project": "my project",
            "memory_per_core_property_name": "memcore",
            "gpu_type": "A100 80GB",
        },
        """\
#OAR -n 'it_s my; job'
#OAR -q gpu
#OAR --project 'my project'
#OAR -l '{gpu_model='"'"'A100 80GB'"'"'}/nodes=1/gpu=2,walltime=00:30:00'
#OAR -p memcore>=8192
#OAR -O /dev/null
#OAR -E /dev/null
# HPCDASK_TAG=hpcdask:ab12cd34

export HPCDASK_JOB_ID="$OAR_JOB_ID" HPCDASK_RESTARTS=0
""",
    ),
    # HTCondor 24: htcondor-jdl(1), request_gpus, require_gpus, arguments, output, MY.attribute,
    # "$(DOLLAR)"; condor_submit(1) reads a description from its standard input.
    "HTCondor": (
        {
            "folder": ODD_FOLDER,
            "disk": "1GB",
            "job_extra_directives": {"+ProjectName": '"abc"'},
            "gpu_type": "NVIDIA A100-SXM4-80GB",
        },
        """\
#CONDOR MY.DaskWorkerName = "htcondor--$F(MY.JobId)--"
#CONDOR batch_name = it's my; job
#CONDOR RequestCpus = MY.DaskWorkerCores
#CONDOR RequestMemory = floor(MY.DaskWorkerMemory / 1048576)
#CONDOR RequestDisk = floor(MY.DaskWorkerDisk / 1024)
#CONDOR MY.JobId = "$(ClusterId).$(ProcId)"
#CONDOR MY.DaskWorkerCores = 8
#CONDOR MY.DaskWorkerMemory = 68719476736
#CONDOR MY.DaskWorkerDisk = 1000000000
#CONDOR +ProjectName = "abc"
#CONDOR request_gpus = 2
#CONDOR require_gpus = DeviceName == "NVIDIA A100-SXM4-80GB"
#CONDOR arguments = $(ClusterId).$(ProcId)
#CONDOR output = /home/ann/it's "old"; $(DOLLAR)1/logs/queue-$(ClusterId).$(ProcId).log
#CONDOR error = /home/ann/it's "old"; $(DOLLAR)1/logs/queue-$(ClusterId).$(ProcId).log
#CONDOR MY.HpcdaskTag = "hpcdask:ab12cd34"
#CONDOR periodic_remove = JobStatus == 5 && HoldReasonCode != 1

[ ! -e '/home/ann/it'"'"'s "old"; $1/logs'/"$1".log ] || exit 75  # started before: the cluster \
replaces this job
export HPCDASK_JOB_ID="$1" HPCDASK_RESTARTS=0
""",
    ),
    # Moab 9: "msub" (it reads #PBS lines; -E sets MOAB_JOBID); Torque: qsub(1), "Requesting
    # Resources" (nodes=1:ppn=8:gpus=2, mem).
    "Moab": (
        {"queue": "gpu", "account": "abc", "gpu_type": "a100"},
        """\
#PBS -N it_s_my__job.hpcdask_ab12cd34
#PBS -q gpu
#PBS -A abc
#PBS -l nodes=1:ppn=8:gpus=2:a100,mem=64GB
#PBS -l walltime=00:30:00
#PBS -v HPCDASK_TAG=hpcdask:ab12cd34
#PBS -j oe
#PBS -o '/home/ann/my runs; 1/logs/'
#PBS -W umask=077

[ ! -e '/home/ann/my runs; 1/logs'/"$MOAB_JOBID".log ] || exit 75  # started \
before: the cluster replaces this job
export HPCDASK_JOB_ID="$MOAB_JOBID" HPCDASK_RESTARTS=0
""",
    ),
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_golden_script(kind: str):
    keywords, expected = GOLDEN[kind]
    prologue = "\n".join([*PROLOGUE, WORKER, ""])
    assert script(kind, **keywords) == f"#!/usr/bin/env bash\n{expected}{prologue}"


# The GPUs among the user's own resources

RESOURCES = {
    ("PBS", "select=1:ncpus=4"): "select=1:ncpus=4:ngpus=2:gpu_type=a100",
    ("PBS", "select=1:ncpus=4:host=n1,x=1"): "select=1:ncpus=4:host=n1:ngpus=2:gpu_type=a100,x=1",
    ("PBS", "select=ncpus=4:ngpus=1"): "select=ncpus=4:ngpus=1",
    ("PBS", "nodes=1:ppn=8,mem=9gb"): "nodes=1:ppn=8:gpus=2:a100,mem=9gb",
    ("PBS", "mem=9gb,nodes=1:ppn=8"): "mem=9gb,nodes=1:ppn=8:gpus=2:a100",
    ("PBS", "nodes=1:gpus=1"): "nodes=1:gpus=1",
    ("PBS", "ncpus=8"): "ngpus=2,gpu_type=a100",
    ("OAR", "host=1"): "'{gpu_model='\"'\"'a100'\"'\"'}host=1/gpu=2,walltime=00:30:00'",
    ("OAR", "/nodes=1/cpu=1"): (
        "'{gpu_model='\"'\"'a100'\"'\"'}/nodes=1/gpu=2/cpu=1,walltime=00:30:00'"
    ),
    ("OAR", "nodes=1/gpu=1"): "nodes=1/gpu=1,walltime=00:30:00",
}


@pytest.mark.parametrize(("kind", "given"), RESOURCES)
def test_gpus_join_the_users_resources(kind: str, given: str):
    lines = directives(kind, resource_spec=given, gpu_type="a100", **KINDS[kind])
    assert f"-l {RESOURCES[kind, given]}" in lines


@pytest.mark.parametrize(
    ("kind", "given"), [("PBS", "select=1:ncpus=4+1:ncpus=8"), ("OAR", "core=8")]
)
def test_resources_in_which_gpus_have_no_place_are_refused(kind: str, given: str):
    with pytest.raises(UsageError, match="leave gpus_per_job out"):
        script(kind, resource_spec=given, **KINDS[kind])


def test_the_tag_joins_the_users_variables():
    lines = directives("PBS", job_extra_directives=["-v A=1"])
    assert "-v A=1,HPCDASK_TAG=hpcdask:ab12cd34" in lines
    assert sum(line.startswith("-v") for line in lines) == 1


TYPES = {
    ("PBS", "model=a100"): "-l select=1:ncpus=8:mem=64GB:ngpus=2:model=a100",
    ("SGE", "model=a100"): "-l gpu=2,model=a100",
    ("SGE", "a100"): "-l gpu=2,gpu_type=a100",
    ("LSF", "gmodel=A100:j_exclusive=yes"): '-gpu "num=2:gmodel=A100:j_exclusive=yes"',
    ("HTCondor", "GlobalMemoryMb >= 40000"): "require_gpus = GlobalMemoryMb >= 40000",
}


@pytest.mark.parametrize(("kind", "gpu_type"), TYPES)
def test_a_type_of_gpu_in_the_sites_words(kind: str, gpu_type: str):
    assert TYPES[kind, gpu_type] in directives(kind, gpu_type=gpu_type, **KINDS[kind])


KINDS = {
    "PBS": {},
    "SGE": {},
    "LSF": {"lsf_units": "mb", "walltime": "1:00"},
    "OAR": {"memory_per_core_property_name": "not_applicable"},
    "HTCondor": {"disk": "1GB"},
    "Moab": {},
}


# SLURM


@pytest.mark.parametrize(
    ("option", "changes", "line"),
    [
        ("gres", {"gpus": 1}, "--gres=gpu:1"),
        ("gres", {"gpus": 8, "nodes": 2, "gpu_type": "a100"}, "--gres=gpu:a100:4"),
        ("gpus-per-node", {"gpus": 8, "nodes": 2}, "--gpus-per-node=4"),
        ("gpus-per-node", {"gpus": 2, "gpu_type": "a100"}, "--gpus-per-node=a100:2"),
        ("gpus", {"gpus": 7, "nodes": 2}, "--gpus=7"),
        ("gpus", {"gpus": 2, "gpu_type": "a 100"}, '--gpus="a 100:2"'),
        ("gres", {"nodes": 2}, "--nodes=2 --ntasks-per-node=1"),
    ],
)
def test_gpu_request_of_slurm(option: GpuRequest, changes: dict[str, Any], line: str):
    assert line in directives("SLURM", of=SlurmQueue(option), **changes)


def test_a_bad_gpu_request():
    with pytest.raises(UsageError, match="'tres' is not one of gres, gpus-per-node, gpus"):
        SlurmQueue("tres")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("own", "line"),
    [
        (["--gres=nvme:100"], "--gres=gpu:2,nvme:100"),
        (["--exclusive --gres nvme:100  # why"], "--gres=gpu:2,nvme:100"),
        (["--gres=nvme:100", "--gres=lustre:1"], "--gres=gpu:2,nvme:100,lustre:1"),
    ],
)
def test_other_gres_of_the_user_stay_beside_the_gpus(own: list[str], line: str):
    """Regression: of several --gres sbatch takes the last, so that the user's were dropped."""
    lines = directives("SLURM", job_extra_directives=own)
    assert [one for one in lines if "--gres" in one][-1] == line
    assert "gpu:" not in script("SLURM", gpus=0, job_extra_directives=own)


@pytest.mark.parametrize("own", ["--mem-per-gpu=40G", "--exclusive --mem-per-cpu 4G", "--mem=1T"])
def test_a_users_memory_takes_the_place_of_the_jobs(own: str):
    lines = directives("SLURM", job_extra_directives=[own])
    assert [one for one in lines if "--mem" in one] == [own]
    assert SlurmQueue.told_memory.search(own)
    assert not any(map(SlurmQueue.told_memory.search, ["--mem-bind=local", "--comment=x--mem"]))


def test_quoting_of_slurm():
    odd = {"job_name": 'a "b" \\c #d', "account": "it's me", "queue": "a;b", "job_mem": "1 G"}
    assert {
        '-J "a \\"b\\" \\\\c #d"',
        '-A "it\'s me"',
        '-p "a;b"',
        '--mem="1 G"',
        "--output=\"/me/50%% of 'it'/#1/queue-%A_%a.log\"",
    } <= {*directives("SLURM", folder="/me/50% of 'it'/#1", **odd)}


@pytest.mark.parametrize("directive", ["--clusters=other", "--exclusive -M other # why"])
def test_directives_that_name_another_cluster_are_refused(directive: str):
    with pytest.raises(UsageError, match=r"squeue and scancel would not .* set SLURM_CLUSTERS in"):
        script("SLURM", job_extra_directives=[directive])


# GPUs that the user's own directives request; None if they request none

OWN_GPUS = {
    ("SLURM", "--gres=gpu:1"): 1,
    ("SLURM", "--gres gpu"): 1,
    ("SLURM", "--gres=nvme:500,gpu:a100:2"): 2,
    ("SLURM", "--gres=gpu:a100:2,gpu:v100:1"): 3,
    ("SLURM", "--gres=gpu:1g.10gb:2  # don't share"): 2,
    ("SLURM", "--qos=high --gpus=2 --time=90"): 2,
    ("SLURM", "--gpus=a100:2,v100:1"): 3,
    ("SLURM", "--gpus-per-node=a100"): 1,
    ("SLURM", "--gpus-per-task=2"): 2,
    ("SLURM", "--gpus-per-socket=2"): 2,
    ("SLURM", "-G2"): 2,
    ("SLURM", "--gres=shard:4"): 1,
    ("SLURM", "--gres=nvme:1,mps:50"): 1,
    ("SLURM", "--tres-per-node=gres/gpu:2"): 2,
    ("SLURM", "--tres-per-node=cpu=4,gres/gpu:h200=2"): 2,
    ("SLURM", "--tres-per-task=cpu=8,gres/gpu=2"): 2,
    ("PBS", "-l select=1:ncpus=8:ngpus=1:mem=64gb"): 1,
    ("PBS", "-l ngpus=2 -l mem=64gb"): 2,
    ("PBS", "-lnodes=1:ppn=8:gpus=2,mem=64gb"): 2,
    ("Moab", "-l nodes=1:ppn=8,gres=gpus:2,mem=64gb"): 2,
    ("Moab", "-W x=GRES:gpus@2"): 2,
    ("LSF", '-gpu "num=2:gmodel=A100"'): 2,
    ("LSF", "-gpu mode=shared:gmem=40G"): 1,
    ("LSF", "-gpu -"): 1,
    ("LSF", '-R "rusage[mem=4000,ngpus_excl_p=2] span[ptile=8]"'): 2,
    ("SGE", "-l gpu=1,h_vmem=40G"): 1,
    ("SGE", "-l h_vmem=40G,ngpus=2"): 2,
    ("SGE", "-l cuda=2"): 2,
    ("OAR", "-l /nodes=1/gpu=1/core=8"): 1,
    ("OAR", """-l "{gpu_model='A100'}/nodes=1/gpu=2/core=8,walltime=2" """): 2,
    ("OAR", "-l /nodes=1/gpu=ALL"): 1,
    ("HTCondor", "Request_GPUs = 2"): 2,
    ("SLURM", "--cpus-per-gpu=8"): None,
    ("SLURM", "--gpu-bind=none"): None,
    ("SLURM", "-p gpus"): None,
    ("SLURM", "--gres=nvme:500"): None,
    ("SLURM", "--tres-per-task=cpu=8"): None,
    ("PBS", "-q lab-gpu"): None,
    ("PBS", "-v A=1,gpus=2"): None,
    ("Moab", "-l feature=gpu"): None,
    ("LSF", '-R "select[ngpus>0]"'): None,
    ("SGE", "-l cuda=12.4"): None,
    ("OAR", """-p "gpu='YES'" """): None,
    ("HTCondor", "require_gpus = Capability >= 8.0"): None,
}


def options(kind: str, directive: str = "", gpus: int | None = None, **more: Any) -> JobOptions:
    """What a cluster's job is, with one directive of the user."""
    own: Any = [directive] if directive else []
    if kind == "HTCondor":
        own = dict(line.split(" = ", 1) for line in own)
    given = {"cores": 8, "memory": "64GiB", "job_extra_directives": own, **KINDS.get(kind, {})}
    return read_job_options(door(kind), {**given, **more, "gpus_per_job": gpus})


@pytest.mark.parametrize(("kind", "directive"), OWN_GPUS)
def test_own_requests_of_gpus_count(kind: str, directive: str):
    found, own = options(kind, directive), OWN_GPUS[kind, directive]
    assert (found.workers, found.asked.gpus) == (own or 1, 0 if own else 1)
    assert found.spec.memory_limit == 2**36 // found.workers
    if own:
        with pytest.raises(UsageError, match="both request GPUs"):
            options(kind, directive, gpus=4)
    else:
        assert options(kind, directive, gpus=4).asked.gpus == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_job_and_what_no_job_can_be(kind: str):
    text = script(kind, gpus=0, job_name="dask-worker", **KINDS[kind])
    assert "gpu" not in text.lower()
    assert "dask-worker" in text
    assert "-l nodes=1:ppn=8,mem=64GB\n" in text or kind != "Moab"
    with pytest.raises(UsageError, match=r"nodes_per_job=2.*SLURM only"):
        script(kind, nodes=2, **KINDS[kind])


def test_a_slurm_job_of_several_nodes_has_its_workers_started_by_srun(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$@"\n')
    srun.chmod(0o700)
    lines = SlurmQueue().on_each_node("echo 'two  words'")

    def says(nodes: str | None) -> str:
        env = {"PATH": f"{tmp_path}:{os.defpath}"} | (
            {"SLURM_JOB_NUM_NODES": nodes} if nodes else {}
        )
        return subprocess.run(["bash", "-c", lines], env=env, capture_output=True, text=True).stdout

    assert says(None) == says("1") == "two  words\n"
    words = says("2").split()
    assert {"-n2", "--ntasks-per-node=1", "-K"} <= set(words)
    assert words[-3:] == ["echo", "two", "words"]


@pytest.mark.parametrize("kind", ["SGE", "LSF", "OAR"])
def test_what_directives_cannot_name_goes_nowhere(kind: str):
    text = script(kind, ODD_FOLDER, **KINDS[kind])
    assert "/dev/null" in text
    assert "queue-" not in text


def test_grid_engine_keeps_the_users_shell():
    lines = directives("SGE", job_extra_directives=["-S /bin/zsh"])
    assert "-S /bin/zsh" in lines
    assert "-S /bin/bash" not in lines


WALLTIMES = {
    ("SLURM", "90"): timedelta(minutes=90),
    ("SLURM", "90:30"): timedelta(minutes=90, seconds=30),
    ("SLURM", "36:00:00"): timedelta(hours=36),
    ("SLURM", "1-12"): timedelta(hours=36),
    ("SLURM", "1-12:30"): timedelta(hours=36, minutes=30),
    ("SLURM", " 1-12:30:30 "): timedelta(hours=36, minutes=30, seconds=30),
    ("SLURM", "UNLIMITED"): timedelta.max,
    ("SLURM", "infinite"): timedelta.max,
    ("PBS", "90"): timedelta(seconds=90),
    ("PBS", "2:00:00"): timedelta(hours=2),
    ("PBS", "1:02:00:00"): timedelta(days=1, hours=2),
    ("SGE", "0:30:0"): timedelta(minutes=30),
    ("LSF", "90"): timedelta(minutes=90),
    ("LSF", "1:30"): timedelta(minutes=90),
    ("Local", "90"): timedelta(seconds=90),
    ("Local", "5min"): timedelta(minutes=5),
    ("Local", "1h30m"): timedelta(minutes=90),
    ("Local", "00:30:00"): timedelta(minutes=30),
    ("OAR", "2"): timedelta(hours=2),
    ("OAR", "0:30"): timedelta(minutes=30),
    ("OAR", "0:30:10"): timedelta(minutes=30, seconds=10),
}


@pytest.mark.parametrize(("kind", "text"), WALLTIMES)
def test_walltimes(kind: str, text: str):
    assert door(kind).parse_walltime(text) == WALLTIMES[kind, text]


@pytest.mark.parametrize("kind", ["SLURM", "PBS", "SGE", "LSF", "OAR"])
def test_walltimes_that_are_none(kind: str):
    dashes = ("1-", "1-1-1") if kind == "SLURM" else ("1-00:00:00",)
    for text in ("", "soon", "2h", "0", "0:00", "1.5", "-5", "1:2:3:4:5", *dashes):
        with pytest.raises(UsageError, match=f"^walltime='{text}' is not one of "):
            door(kind).parse_walltime(text)


# Lines that are left out, and the user's memory


SKIPPED = {
    "SLURM": "--gres",
    "PBS": "ngpus",
    "SGE": "gpu=",
    "LSF": "-gpu",
    "OAR": "gpu=",
    "Moab": "gpus=",
}


@pytest.mark.parametrize("kind", SKIPPED)
def test_directives_that_are_left_out_may_be_the_request_of_gpus(kind: str):
    given = {**KINDS.get(kind, {}), "job_directives_skip": [SKIPPED[kind], TAG]}
    text = script(kind, **given)
    assert SKIPPED[kind] not in text
    assert TAG.removeprefix("hpcdask:") in text, "the tag stays"


def test_memory_of_a_users_directive():
    assert "-M 64GB" not in directives("LSF", **KINDS["LSF"], job_extra_directives=["-M 9GB"])
    found = read_job_options(
        door("SLURM"), {"cores": 8, "job_extra_directives": ["--mem-per-gpu=40G"]}
    )
    assert found.spec.memory_limit is None  # the job learns of it
    with pytest.raises(UsageError, match="the workers' memory is not known here"):
        wishes(print, {"": found}, {"memory": "80GB"}, {})
    for kind in ("SLURM", "PBS"):
        with pytest.raises(UsageError, match="cores and memory of a job are missing"):
            read_job_options(door(kind), {"cores": 8, "job_extra_directives": ["-l mem=9gb"]})


def test_the_umask_is_read_and_not_set(monkeypatch: pytest.MonkeyPatch):
    """Regression: for a moment, files that other threads made had the script's umask."""
    found, before = options("SLURM"), os.umask(0o027)
    os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask is set"))
        text = found.script(door("SLURM"), "ab-1", FOLDER, "tcp://h:1", tls=False)
    finally:
        monkeypatch.undo()
        os.umask(before)
    assert "\numask 0027\n" in text


# Values with line ends

ALL = ("SLURM", "PBS", "Moab", "LSF", "SGE", "OAR", "HTCondor", "Local")
#: Keywords that are no texts in a script, or are shell as the user wrote it.
NO_TEXTS = {
    *("config_name", "cores", "processes", "nanny", "protocol", "interface", "memory"),
    *("death_timeout", "extra", "worker_extra_args", "log_directory", "use_stdin", "lsf_units"),
    *("job_script_prologue", "env_extra", "worker_command", "local_directory", "ncpus", "mem"),
    *("job_extra", "header_skip", "job_directives_skip", "job_cpu"),
}


def text_keywords(kind: str) -> list[str]:
    """The keywords of a system whose texts may stand in its scripts."""
    job = getattr(import_jobqueue(kind.lower()), f"{kind}Job")
    return sorted({*job_keywords(job) - NO_TEXTS, "gpu_type"})


def whole(kind: str, keyword: str, value: Any) -> str:
    """The script of a cluster's job with one more keyword."""
    if keyword == "job_extra_directives":
        value = {"name": value} if kind == "HTCondor" else [value]
    elif keyword.endswith("_command_extra"):
        value = [value]
    found = options(kind, gpus=1, **{keyword: value})
    return found.script(door(kind), "ab-1", FOLDER, "tcp://h:1", tls=False)


@pytest.mark.parametrize(("kind", "keyword"), [(k, w) for k in ALL for w in text_keywords(k)])
def test_no_value_brings_a_line_into_a_script(kind: str, keyword: str):
    for end in ("\n", "\r", "\x85", "\u2028"):
        with pytest.raises(UsageError, match=r"control character or line end"):
            whole(kind, keyword, f"a{end}touch /tmp/owned")


@pytest.mark.filterwarnings("ignore:project has been renamed:FutureWarning")
@pytest.mark.parametrize("kind", ALL)
@given(data=strategies.data())
@settings(max_examples=15, deadline=None)
def test_whatever_the_text_is_it_stays_in_its_line(kind: str, data: Any):
    keyword = data.draw(strategies.sampled_from(["job_name", "gpu_type", *text_keywords(kind)]))
    text = data.draw(
        strategies.text(min_size=1) | strategies.text("\"';#$`\\\n\x0b\x85\u2028 a", min_size=1)
    )
    try:
        script = whole(kind, keyword, text)
    except UsageError:
        return
    header = script[: script.index("umask 077")].split("\n")
    assert script.splitlines() == script[:-1].split("\n")
    shell = [line for line in header[1:] if line and not line.startswith("#")]
    assert all(line.startswith("[ ! -e ") for line in shell)  # the guard of a second life


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("end", ["\n", "\x0b", "\x85", "\u2028"])
def test_nor_does_a_configured_value_or_a_folder_s_name(kind: str, end: str):
    with (
        dask.config.set({f"jobqueue.{kind.lower()}.name": f"a{end}touch /tmp/owned"}),
        pytest.raises(UsageError, match="line end"),
    ):
        whole(kind, "job_name", None)
    if kind != "Local":  # which writes it as JSON
        with pytest.raises(UsageError, match="line end"):
            script(kind, f"/home/ann/a{end}touch b/logs", **KINDS.get(kind, {}))
