"""`hpcdask bench` on real GPUs: every computation is right there, and stays within its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdask.devices import Gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]


def bench(*arguments: str) -> list[dict]:
    """Run on all GPUs of this machine; the JSON lines."""
    done = subprocess.run(
        [sys.executable, "-m", "hpcdask.bench", *arguments],
        capture_output=True,
        text=True,
        timeout=170,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("operation", ["mean", "std", "transpose", "matmul", "fft", "stencil"])
def test_operations(gpus: list[Gpu], operation: str) -> None:
    argv = ["--operation", operation, "--size", "8GB", "--form", "both", "--repeats", "1"]
    for line in bench("array", *argv):
        assert line["devices"] == {gpus[0].name: len(gpus)}
        assert all(check["ok"] for check in line["checks"])
        assert 0 < line["limit"]["fraction"] < 1.2


@pytest.mark.parametrize(
    "options",
    [
        ["--size", "10GB", "--passes", "2"],
        ["--size", "10GB", "--packed"],
        ["--size", "10GB", "--packed", "--passes", "2"],
        ["--exact", "--form", "both"],
    ],
)
def test_svd(gpus: list[Gpu], options: list[str]) -> None:
    for line in bench("svd", *options, "--repeats", "1"):
        assert line["devices"] == {gpus[0].name: len(gpus)}
        assert all(check["ok"] for check in line["checks"])


def test_startup_has_the_phases_of_a_gpu(gpus: list[Gpu]) -> None:
    (line,) = bench("startup")
    names = {part["name"] for part in line["phases"]}
    assert {"CUDA context", "imports of CUDA packages", "memory pool"} <= names


def test_the_report_has_the_heat_map(gpus: list[Gpu], tmp_path: Path) -> None:
    if len(gpus) < 2:
        pytest.skip("a single GPU")
    page = tmp_path / "report.html"
    bench("exchange", "--repeats", "1", "--report", str(page))
    assert "<svg" in page.read_text()
