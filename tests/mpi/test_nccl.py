"""NCCL in the doctor and the bench, with a stand-in for CuPy and NCCL where there is no GPU."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdask.doctor import proofs
from hpcdask.doctor.proofs import Outcome

STAND_IN = Path(__file__).parents[1] / "nccl_stand_in"
FAR = 60
MEMBERS = {f"GPU-{n}": (n // 2, f"GPU {n % 2} of n{n // 2}") for n in range(4)}
TWO = dict([*MEMBERS.items()][:2])


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Processes find the stand-in instead of CuPy, and sum short arrays."""
    path = os.pathsep.join(filter(None, [str(STAND_IN), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    monkeypatch.setattr(proofs, "NBYTES", 4096)
    return monkeypatch


def measured(members: dict[str, tuple[int, str]]) -> list[tuple[str, str, str, str]]:
    known = asyncio.run(proofs.measure(members, proofs.obey))
    return told(known)


def told(known: list[tuple[str, Outcome]]) -> list[tuple[str, str, str, str]]:
    found = proofs.check_nccl(known)
    return [(one.topic, one.status, one.value, one.advice) for one in found]


# The doctor


def test_all_is_well(stand_in):
    version, (topic, status, value, _) = measured(MEMBERS)
    assert version == ("version", "ok", "2.28.9", "")
    assert (topic, status) == ("all-reduce", "ok")
    assert value.startswith("right between 4 GPUs, ")
    assert value.endswith(" GB/s bus bandwidth with 4.00 kiB of each")


SAYS = "RuntimeError: NCCL_ERROR_SYSTEM_ERROR. NCCL says: Connection refused (communicator)"


@pytest.mark.parametrize(
    ("gpus", "fault", "reason", "advice"),
    [
        (["GPU-0", "GPU-1"], ("join", "raise"), SAYS, "NCCL_SOCKET_IFNAME"),
        ([""], ("id", "raise"), SAYS, "NCCL_SOCKET_IFNAME"),
        (["GPU-0", "GPU-1"], ("sum", "die"), "its process ended with code -9 (all-reduce)", "P2P"),
        (["GPU-0", "GPU-1"], ("sum", "wrong"), "the sum is wrong (all-reduce)", "NCCL_IB_DISABLE"),
        ([], ("", ""), "libnccl.so.2 cannot be loaded (library)", "Install NCCL for the CUDA of"),
    ],
    ids=["join", "no network", "dies", "wrong", "not installed"],
)
def test_a_fault_is_told_with_its_step(stand_in, gpus, fault, reason, advice):
    stand_in.setenv("STAND_IN_FAULTS", json.dumps(dict.fromkeys(gpus, fault)))
    stand_in.setenv("CUDA_VISIBLE_DEVICES", "")
    if not gpus:
        stand_in.setenv("STAND_IN_MISSING", "1")
    topic, status, value, remedy = measured(TWO)[-1]
    assert (topic, status, value) == ("all-reduce", "error", f"all GPUs: {reason}")
    assert advice in remedy


def test_what_hangs_is_given_up(stand_in):
    stand_in.setenv("STAND_IN_FAULTS", json.dumps({"GPU-0": ["join", "hang"]}))
    stand_in.setattr(proofs, "NCCL_DEADLINE_S", 2.0)
    assert "no answer within 2 s" in measured(TWO)[-1][2]


def test_the_gpu_that_fails_is_named_and_those_that_wait_are_counted():
    steps = [{"step": "all-reduce"}]
    found = told([("a", Outcome(steps)), ("b", Outcome(steps, -9)), ("c", Outcome(steps))])
    assert [value for *_, value, _ in found] == [
        "b: its process ended with code -9 (all-reduce)",
        "2 other GPUs: no answer within 60 s (all-reduce)",
    ]


def test_versions_that_differ():
    def one(version: str) -> Outcome:
        return Outcome([{"version": version}, {"seconds": 1.0, "right": True}], 0)

    version, reduced = told([("a", one("2.28.9")), ("b", one("2.27.5")), ("c", one("2.28.9"))])
    assert version[1:3] == ("error", "2.28.9 on a, c; 2.27.5 on b")
    assert reduced[1] == "ok"


def test_cupy_says_that_it_finds_no_nccl():
    """In a process of its own: CuPy's attempt is made once."""
    code = "from hpcdask.gpu import nccl; print(nccl.missing() or nccl.version())"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=FAR
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("libnccl.so.2 cannot be loaded", "CuPy, which", "2."))
