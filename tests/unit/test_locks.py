"""Taking free GPUs of a node that jobs share, and seeing which a cgroup hides."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdask.errors import DeviceError
from hpcdask.gpu import driver, locks
from hpcdask.gpu.devices import Gpu

GPUS = [Gpu(f"GPU-{n}", "NVIDIA Test", 1 << 30) for n in range(3)]
HOLD = """
import sys
from hpcdask.gpu import locks
from hpcdask.gpu.devices import Gpu
gpus = [Gpu(f"GPU-{n}", "", 1) for n in range(3)]
taken = locks.lock_gpus(gpus, int(sys.argv[2]), "job 9", sys.argv[1])
print([gpu.uuid for gpu in taken], flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(locks, "LOCK_DEADLINE_S", 0.0)


@pytest.fixture
def other(tmp_path):
    """Another process that holds the first two GPUs."""
    command = [sys.executable, "-c", HOLD, str(tmp_path), "2"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "['GPU-0', 'GPU-1']\n"
        yield process
        process.kill()


def test_a_free_gpu_is_taken_for_the_process_only(tmp_path, other):
    assert locks.lock_gpus(GPUS, 1, "job 10", str(tmp_path)) == [GPUS[2]]
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [
        f"hpcdask-{os.getuid()}-GPU-{n}.lock" for n in range(3)
    ]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_too_few_are_free(tmp_path, other):
    with pytest.raises(DeviceError) as error:
        locks.lock_gpus(GPUS, 2, "job 10", str(tmp_path))
    assert "GPU-0 by job 9; GPU-1 by job 9" in str(error.value)
    other.kill()
    other.wait()
    # It let go of the third one, which was free
    assert locks.lock_gpus(GPUS, 3, "job 10", str(tmp_path)) == GPUS


def test_it_waits_for_an_earlier_job_to_end(tmp_path, other, monkeypatch):
    monkeypatch.setattr(locks, "LOCK_DEADLINE_S", 20.0)
    monkeypatch.setattr(locks.time, "sleep", lambda seconds: other.kill())
    assert locks.lock_gpus(GPUS, 3, "job 10", str(tmp_path)) == GPUS


def test_parts_of_gpus_are_shared_on_purpose(monkeypatch):
    assert not locks.shared_on_purpose()
    monkeypatch.setenv("SLURM_SHARDS_ON_NODE", "1")
    assert locks.shared_on_purpose()


@pytest.mark.parametrize(("devices", "hidden"), [([0, 1], 0), ([0], 1), ([], 2)])
def test_hidden_gpus(tmp_path: Path, devices, hidden):
    for minor in range(2):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:0{minor}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: NVIDIA Test\nDevice Minor: \t {minor}\n")
    (tmp_path / "dev").mkdir()
    for minor in devices:
        (tmp_path / f"dev/nvidia{minor}").touch()
    assert driver.hidden_gpus(f"{tmp_path}/") == hidden
