"""`hpcdask bench` on real GPUs: every computation is right there, and stays within its memory."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpu_launching import nvlink_joins, run_python, used_memory
from hpcdask.gpu.devices import Gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]


def bench(*arguments: str, runner: tuple[str, ...] = ()) -> list[dict]:
    """Run on all GPUs of this machine, with options of the runner; the JSON lines."""
    around = ["-m", "hpcdask.run", *runner] if runner else []
    done = run_python(*around, "-m", "hpcdask.bench", *arguments, timeout=170)
    return [json.loads(line) for line in done.stdout.splitlines()]


@contextlib.contextmanager
def most_used() -> Iterator[list[int]]:
    """Bytes of device memory in use in all, seen often."""
    seen: list[int] = []
    end = threading.Event()

    def watch() -> None:
        while not end.wait(0.05):
            seen.append(2**20 * sum(used_memory()))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(watch)
        try:
            yield seen
        finally:
            end.set()


@pytest.mark.parametrize(
    "words",
    [
        *(f"array --operation {one} --size 8GB" for one in ("std", "fft", "stencil")),
        "svd --size 10GB --form both",
        "svd --size 10GB --packed",
        "svd --exact",
    ],
)
def test_results_are_right(gpus: list[Gpu], words: str) -> None:
    for line in bench(*words.split(), "--repeats", "1"):
        assert line["devices"] == {gpus[0].name: len(gpus)}
        assert all(check["ok"] for check in line["checks"])
        assert words.startswith("svd") or 0 < line["limit"]["fraction"] < 1.2


def test_startup_has_the_phases_of_a_gpu(gpus: list[Gpu]) -> None:
    (line,) = bench("startup")
    assert {"CUDA context", "imports of CUDA packages", "memory pool"} <= {*line["phases"]}


def test_the_report_has_the_heat_map_and_the_gpus(gpus: list[Gpu], tmp_path: Path) -> None:
    if len(gpus) < 2:
        pytest.skip("a single GPU")
    page = tmp_path / "report.html"
    (line,) = bench("exchange", "--repeats", "1", "--report", str(page))
    assert line["gpus"]["models"] == {gpus[0].name: len(gpus)}
    if nvlink_joins(gpus):
        assert {pair["over"] for pair in line["exchange"]["pairs"]} == {"ucx"}
    text = page.read_text()
    assert "GPU hours" in text
    assert "Exchange between workers" in text
    assert "mean utilisation" in text


def test_a_packed_matrix_is_not_unpacked_in_memory(gpus: list[Gpu]) -> None:
    packed = 10 * 10**9 * len(gpus)
    with most_used() as most:
        argv = ["--size", f"{4 * packed}B", "--packed", "--repeats", "1"]
        bench("svd", *argv, runner=("--rmm-pool-size", "0"))
    # Contexts, UCX, scratch, and what the rates of the devices are measured with
    assert packed < max(most) < packed + 7 * 10**9 * len(gpus)
