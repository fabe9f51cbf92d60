"""NCCL in the doctor and the bench, with a stand-in for CuPy and NCCL where there is no GPU."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcdask.doctor import proofs
from hpcdask.doctor.proofs import Member, Outcome
from hpcdask.doctor.report import Finding

STAND_IN = Path(__file__).parents[1] / "nccl_stand_in"
FAR = 60
MEMBERS = [Member(n // 2, f"GPU {n % 2} of n{n // 2}", f"GPU-{n}") for n in range(4)]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Processes find the stand-in instead of CuPy, and sum short arrays."""
    path = os.pathsep.join(filter(None, [str(STAND_IN), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    monkeypatch.setattr(proofs, "NBYTES", 4096)
    return monkeypatch


def measured(members: list[Member]) -> tuple[list[tuple[str, Outcome]], list[Finding]]:
    async def ask(rank: int, order: dict[str, Any]) -> dict[str, Outcome]:
        return await proofs.obey(rank, order)

    known = asyncio.run(proofs.measure(members, ask))
    return known, list(proofs.check_nccl(known))


def told(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(one.topic, one.status, one.value) for one in findings]


# The doctor


def test_all_is_well(stand_in):
    _, found = measured(MEMBERS)
    version, reduced = told(found)
    assert version == ("version", "ok", "2.28.9")
    assert reduced[:2] == ("all-reduce", "ok")
    assert reduced[2].startswith("right between 4 GPUs, ")
    assert reduced[2].endswith(" GB/s bus bandwidth with 4.00 kiB of each")


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (
            ("join", "raise"),
            "RuntimeError: NCCL_ERROR_SYSTEM_ERROR. NCCL says: Connection refused (communicator)",
        ),
        (("sum", "die"), "its process ended with code -9 (all-reduce)"),
        (("sum", "wrong"), "the sum is wrong (all-reduce)"),
    ],
)
def test_a_fault_is_told_with_its_step(stand_in, fault, why):
    stand_in.setenv("STAND_IN_FAULTS", json.dumps({"GPU-0": fault, "GPU-1": fault}))
    _, found = measured(MEMBERS[:2])
    assert told(found)[1:] == [("all-reduce", "error", f"all GPUs: {why}")]


def test_what_hangs_is_given_up(stand_in):
    stand_in.setenv("STAND_IN_FAULTS", json.dumps({"GPU-0": ["join", "hang"]}))
    stand_in.setattr(proofs, "NCCL_DEADLINE_S", 2.0)
    known, found = measured(MEMBERS[:2])
    assert {one.ended for _, one in known} == {None}
    assert "no answer within 2 s" in found[-1].value


def ended(*steps: dict[str, Any], code: int | None = None) -> Outcome:
    """What a process told, by default until it was given up."""
    return Outcome(list(steps), code)


JOINING, SUMMING = {"step": "communicator"}, {"step": "all-reduce"}


def test_the_gpu_that_fails_is_named_and_those_that_wait_are_counted():
    told_ = [ended(SUMMING), ended(SUMMING, code=-9), ended(SUMMING)]
    known = list(zip("abc", told_, strict=True))
    assert told(list(proofs.check_nccl(known))) == [
        ("all-reduce", "error", "b: its process ended with code -9 (all-reduce)"),
        ("all-reduce", "error", "2 other GPUs: no answer within 60 s (all-reduce)"),
    ]


def test_nccl_that_is_not_installed(stand_in):
    stand_in.setenv("STAND_IN_MISSING", "1")
    _, found = measured(MEMBERS)
    (one,) = found
    assert one.status == "error"
    assert one.value == "all GPUs: libnccl.so.2 cannot be loaded (library)"
    assert "Install NCCL for the CUDA of CuPy" in one.advice


def test_a_network_that_nccl_does_not_find(stand_in):
    stand_in.setenv("STAND_IN_FAULTS", json.dumps({"": ["id", "raise"]}))
    stand_in.setenv("CUDA_VISIBLE_DEVICES", "")
    _, found = measured(MEMBERS[:2])
    _, (topic, status, value) = told(found)
    assert (topic, status) == ("all-reduce", "error")
    assert value.startswith("all GPUs: RuntimeError: NCCL_ERROR_SYSTEM_ERROR. NCCL says: ")
    assert "NCCL_SOCKET_IFNAME" in found[1].advice


def test_versions_that_differ():
    def one(version: str) -> Outcome:
        steps = [{"step": "communicator", "version": version}, {"seconds": 1.0, "right": True}]
        return Outcome(steps, 0)

    known = [("a", one("2.28.9")), ("b", one("2.27.5")), ("c", one("2.28.9"))]
    version, reduced = proofs.check_nccl(known)
    assert version.status == "error"
    assert version.value == "2.28.9 on a, c; 2.27.5 on b"
    assert reduced.status == "ok"


def test_cupy_says_that_it_finds_no_nccl():
    """In a process of its own: CuPy's attempt is made once."""
    code = "from hpcdask.gpu import nccl; print(nccl.missing() or nccl.version())"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=FAR
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("libnccl.so.2 cannot be loaded", "CuPy, which", "2."))
