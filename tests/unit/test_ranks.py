"""Ranks from the variables that launchers set, as recorded from them."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdask.bootstrap.ranks import detect
from hpcdask.queues.registry import job_id


def recorded(text: str) -> dict[str, str]:
    """Return variables as ``env`` shows them."""
    return dict(word.split("=", 1) for word in text.split())


OPENMPI = recorded(
    """
    OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1
    OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 PMIX_NAMESPACE=prterun-node1-26652@1
    PMIX_RANK=3
    """
)
MPICH = recorded(
    """
    HYDI_CONTROL_FD=7 MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 PMI_FD=9 PMI_HOSTNAME=node1
    PMI_RANK=3 PMI_SIZE=4
    """
)
INTEL = recorded(
    """
    I_MPI_HYDRA_TOPOLIB=hwloc I_MPI_INFO_NP=4 MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 PMI_FD=6
    PMI_RANK=3 PMI_SIZE=4
    """
)
MVAPICH = recorded(
    """
    MPISPAWN_MPIRUN_ID=8861 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2
    MV2_COMM_WORLD_RANK=3 MV2_COMM_WORLD_SIZE=4 PMI_ID=3 PMI_PORT=node1:42817 PMI_SIZE=4
    """
)
PALS = recorded(
    """
    PALS_APID=5b1b1a6c-8f3a-4a17-a5d6-0f5f2a3d6f0e PALS_DEPTH=8 PALS_LOCAL_RANKID=1
    PALS_LOCAL_SIZE=2 PALS_NODEID=1 PALS_RANKID=3 PMI_CONTROL_PORT=11999 PMI_LOCAL_RANK=1
    PMI_LOCAL_SIZE=2 PMI_RANK=3 PMI_SIZE=4
    """
)
# flux run -N2 -n4; on Crays, Flux has a plugin that sets PALS's variables, too
FLUX = recorded(
    """
    FLUX_ENCLOSING_ID=ƒD2e73NP FLUX_JOB_ID=ƒDCB6RV FLUX_JOB_NNODES=2 FLUX_JOB_SIZE=4
    FLUX_TASK_LOCAL_ID=1 FLUX_TASK_RANK=3 PMI_FD=9 PMI_RANK=3 PMI_SIZE=4
    """
)
BATCH = recorded(
    """
    SLURM_CPUS_ON_NODE=2 SLURM_GTIDS=0 SLURM_JOB_ID=11 SLURM_JOB_NUM_NODES=2 SLURM_LOCALID=0
    SLURM_NNODES=2 SLURM_NODEID=0 SLURM_NPROCS=4 SLURM_NTASKS=4 SLURM_PROCID=0
    SLURM_TASKS_PER_NODE=2(x2)
    """
)
SRUN = BATCH | recorded(
    """
    SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_PROCID=3 SLURM_STEPID=0 SLURM_STEP_ID=0
    SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2)
    """
)
PMI2 = {"PMI_FD": "13", "PMI_JOBID": "11.0", "PMI_RANK": "3", "PMI_SIZE": "4"}
PMIX = {"PMIX_NAMESPACE": "slurm.pmix.11.0", "PMIX_RANK": "3", "PMIX_SERVER_TMPDIR": "/x"}
CRAY = {"PMI_CONTROL_PORT": "20000", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", "PMI_RANK": "3"}
# srun --pty bash
SHELL_BY_SRUN = SRUN | recorded(
    """
    SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 SLURM_PTY_PORT=40000
    """
)
# mpirun in a batch script starts its daemons, and with them the ranks, by srun: one task a node
BY_SRUN = BATCH | recorded(
    """
    SLURM_NODEID=1 SLURM_PROCID=1 SLURM_STEP_ID=1 SLURM_STEP_NUM_TASKS=2
    SLURM_STEP_TASKS_PER_NODE=1(x2)
    """
)


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (OPENMPI, "openmpi"),
        (MPICH, "hydra"),
        (INTEL, "hydra"),
        (MVAPICH, "mvapich"),
        (PALS, "pals"),
        (FLUX, "flux"),
        ({**FLUX, "PALS_APID": "7", "PALS_RANKID": "3"}, "flux"),
        ({**FLUX, **MPICH}, "hydra"),
        (SRUN, "srun"),
        ({**SHELL_BY_SRUN, **OPENMPI}, "openmpi"),
        ({**SHELL_BY_SRUN, **MPICH}, "hydra"),
        ({**SRUN, **PMI2}, "srun"),
        ({**SRUN, **PMIX}, "srun"),
        ({**SRUN, **CRAY, "PMI_SIZE": "4"}, "srun"),
        ({**BY_SRUN, **OPENMPI}, "openmpi"),
        ({**BY_SRUN, **MPICH}, "hydra"),
        ({"PBS_JOBID": "7", **PALS}, "pals"),
    ],
)
def test_rank(environ, launcher):
    rank = detect(environ)
    assert rank is not None
    assert (rank.index, rank.size, rank.local_index, rank.local_size) == (3, 4, 1, 2)
    assert rank.launcher == launcher
    assert rank.host == socket.gethostname()
    assert not rank.one_node


@pytest.mark.parametrize(
    "environ",
    [
        *({}, BATCH, {"PBS_JOBID": "7"}),
        *({**SHELL_BY_SRUN, **plugin} for plugin in ({}, PMI2, PMIX)),  # the user is the launcher
    ],
)
def test_no_launcher(environ):
    rank = detect(environ)
    assert rank is not None
    assert (rank.index, rank.size, rank.local_index, rank.local_size) == (0, 1, 0, 1)
    assert (rank.launcher, rank.one_node) == ("none", True)


@pytest.mark.parametrize(
    "environ",
    [
        {"PMIX_RANK": "3", "PMIX_NAMESPACE": "prte"},
        {"PMI_FD": "9"},
        {"JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "4"},
        {name: value for name, value in OPENMPI.items() if "LOCAL_SIZE" not in name},
        {name: value for name, value in MPICH.items() if not name.startswith("MPI_")},
        {**FLUX, "FLUX_TASK_LOCAL_ID": "0"},  # not side by side
        {**FLUX, "FLUX_JOB_SIZE": "5"},
        {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(y2)"},
        {**SRUN, "SLURM_PROCID": "three"},
    ],
)
def test_too_little_is_said_so_mpi_must_be_asked(environ):
    assert detect(environ) is None


@given(st.lists(st.integers(1, 200), min_size=1, max_size=30), st.data())
def test_tasks_per_node_as_slurm_shortens_them(counts, data):
    groups: list[list[int]] = []
    for count in counts:
        if groups and groups[-1][0] == count:
            groups[-1][1] += 1
        else:
            groups.append([count, 1])
    text = ",".join(f"{count}(x{n})" if n > 1 else str(count) for count, n in groups)
    node = data.draw(st.integers(0, len(counts) - 1))
    environ = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": str(node)}
    rank = detect(environ)
    assert rank is not None
    assert rank.local_size == counts[node]


# --- launch ids -----------------------------------------------------------------------------------


def launch_id(environ: dict[str, str]) -> str:
    rank = detect(environ)
    assert rank is not None
    return rank.launch_id


@pytest.mark.parametrize("environ", [OPENMPI, MPICH, MVAPICH, PALS, FLUX, SRUN, {**SRUN, **PMI2}])
def test_ranks_of_a_launch_share_its_id(environ):
    names = ("RANK", "LOCAL_ID", "RANKID", "PROCID", "LOCALID", "NODEID", "PMI_ID", "PMI_FD")
    other = {name: "0" if name.endswith(names) else value for name, value in environ.items()}
    assert other != environ
    assert launch_id(environ) == launch_id(other)


@pytest.mark.parametrize(
    ("environ", "change"),
    [
        (SRUN, {"SLURM_STEP_ID": "1"}),
        (SRUN, {"SLURM_JOB_ID": "12"}),
        (SRUN, {"SLURM_RESTART_COUNT": "1"}),
        ({**SRUN, "SLURM_RESTART_COUNT": "1"}, {"SLURM_RESTART_COUNT": "2"}),
        ({**BATCH, **OPENMPI}, {"SLURM_RESTART_COUNT": "1"}),
        ({**BATCH, **MPICH}, {"SLURM_RESTART_COUNT": "1"}),
        (OPENMPI, {"PMIX_NAMESPACE": "prterun-node1-26653@1"}),
        (PALS, {"PALS_APID": "another"}),
        (FLUX, {"FLUX_JOB_ID": "\u0192another"}),
        (FLUX, {"FLUX_ENCLOSING_ID": "\u0192another"}),
        (PALS, {"PBS_JOBID": "8"}),
    ],
)
def test_launches_have_different_ids(environ, change):
    assert launch_id(environ) != launch_id({**environ, **change})


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, "7.r0"),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, "7.r2"),
        ({"PBS_JOBID": "7.server"}, "7.server.r0"),
        ({"SGE_TASK_ID": "undefined"}, None),
        ({"LSB_JOBID": ""}, None),
    ],
)
def test_job_id(environ, job):
    assert job_id(environ) == job


def test_jobs_of_grid_engine():
    """Only in an array job is SGE_TASK_ID a number, and then it is not the job's."""
    environ = {"SGE_JOB_SPOOL_DIR": "/var/spool/sge/7", "JOB_ID": "7", "SGE_TASK_ID": "undefined"}
    environs = [environ, {**environ, "SGE_TASK_ID": "1"}, {**environ, "SGE_TASK_ID": "2"}]
    environs.append({**environs[1], "JOB_ID": "8"})
    ids = [job_id(one) for one in environs]
    assert None not in ids
    assert len(set(ids)) == 4
