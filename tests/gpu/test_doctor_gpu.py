"""`hpcdask doctor` where there are GPUs: all is well, and what makes it slow is reported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from hpcdask.comm import fabric
from hpcdask.gpu.devices import Gpu

pytestmark = pytest.mark.gpu

DOCTOR = [sys.executable, "-m", "hpcdask", "doctor", "--json"]
#: Takes a little memory of the first GPU, says so, and waits for the end of its input.
TENANT = "import cupy, sys; a = cupy.ones(2**27); print(float(a[0]), flush=True); sys.stdin.read()"


def doctor(
    *prefix: str, more: tuple[str, ...] = (), **variables: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The report, and all its findings."""
    done = subprocess.run(
        [*prefix, *DOCTOR, *more],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        check=False,
        env={
            **os.environ,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            **variables,
        },
    )
    made = json.loads(done.stdout)
    assert done.returncode == made["exit_code"], done.stderr
    findings = [one for node in made["nodes"] for one in node["findings"]]
    return made, [*findings, *made["between_nodes"]]


def of_topic(findings: list[dict[str, Any]], topic: str) -> dict[str, Any]:
    (found,) = [one for one in findings if one["topic"] == topic]
    return found


def check_all_reduce(findings: list[dict[str, Any]], gpus: int) -> None:
    """Check that NCCL was right between that many GPUs, where there are several and it loads."""
    if (
        gpus > 1
        and "cannot be loaded" not in (reduced := of_topic(findings, "all-reduce"))["value"]
    ):
        assert reduced["status"] == "ok", reduced
        assert reduced["value"].startswith(f"right between {gpus} GPUs, ")
        assert of_topic(findings, "version")["status"] == "ok"


def test_the_gpus_are_seen_and_the_packages_load(gpus: list[Gpu]) -> None:
    made, findings = doctor(more=("--nccl",))
    kinds = of_topic(findings, "GPUs")
    assert f"{len(gpus)} x {gpus[0].name}" in kinds["value"], made
    assert [one for one in findings if one["group"] == "could not be looked at"] == []
    for step in ("cupy", "GPUs", "rmm", "ucxx"):
        assert of_topic(findings, f"{step} works")["status"] == "ok"
    assert "cuda" in of_topic(findings, "ucxx works")["value"]
    assert of_topic(findings, "driver")["status"] == "ok"
    assert made["exit_code"] < 2, made["verdict"]
    joined = {frozenset(pair) for pair in fabric.look().nvlink}
    if len(gpus) > 1 and len(joined) == len(gpus) * (len(gpus) - 1) // 2:
        assert of_topic(findings, "NVLink")["value"] == "between all GPUs"
        assert "auto would choose ucx" in of_topic(findings, "protocol")["value"]
    check_all_reduce(findings, len(gpus))


def test_ucx_over_tcp_is_reported_as_slow(gpus: list[Gpu]) -> None:
    made, findings = doctor(UCX_TLS="tcp")
    found = of_topic(findings, "UCX_TLS")
    assert found["status"] == "warning"
    assert "slow" in found["value"]
    assert made["exit_code"] >= 1
    if fabric.look().nvlink and len(gpus) > 1:
        assert "NVLink is not used" in found["value"]


def test_a_process_on_a_gpu_is_reported(gpus: list[Gpu]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TENANT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as tenant:
        assert tenant.stdout is not None
        assert tenant.stdout.readline() == b"1.0\n"
        _, findings = doctor()
        tenant.communicate(timeout=30)
    found = of_topic(findings, "other processes")
    assert found["status"] == "warning"
    assert "python" in found["value"]


def test_under_mpirun_each_rank_has_its_gpu(gpus: list[Gpu]) -> None:
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.fail("no mpirun on PATH")
    if len(gpus) < 2:
        pytest.skip("needs two GPUs")
    bind = ["sh", "-c", 'export CUDA_VISIBLE_DEVICES=$OMPI_COMM_WORLD_LOCAL_RANK; exec "$@"', "sh"]
    launch = [mpirun, "--oversubscribe", "-n", str(len(gpus)), *bind]
    made, findings = doctor(*launch, more=("--nccl",))
    assert made["ranks"] == len(gpus)
    assert of_topic(findings, "GPU of each rank")["value"] == "each sees its own"
    assert f"{len(gpus)} x {gpus[0].name}" in of_topic(findings, "GPUs")["value"]
    assert not [one for one in findings if one["topic"] == "confined"]
    # the doctor's own contexts on the GPUs come after all ranks have looked
    assert not [one for one in findings if one["topic"] == "other processes"]
    check_all_reduce(findings, len(gpus))
