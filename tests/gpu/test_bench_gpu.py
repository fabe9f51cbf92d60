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


def test_all_that_is_measured_is_right(gpus: list[Gpu], tmp_path: Path) -> None:
    """Also the report's heat map, and the use of the GPUs."""
    page = tmp_path / "report.html"
    lines = bench("all", "--repeats", "1", "--report", str(page))
    found = {f"{line['workload']} {line['form']} {line['variant']}".strip() for line in lines}
    assert {"svd tuned 2 bits", "svd stock exact", "array stock fft"} <= found
    for line in lines:
        assert line["devices"] == {gpus[0].name: len(gpus)}
        assert line["workload"] == "startup" or line["gpus"]["models"] == line["devices"]
        assert all(check["ok"] for check in line["checks"])
        assert line["workload"] != "array" or 0 < line["limit"]["fraction"] < 1.2
    (startup,) = (line for line in lines if line["workload"] == "startup")
    assert {"CUDA context", "imports of CUDA packages", "memory pool"} <= {*startup["phases"]}
    if nvlink_joins(gpus):
        (exchange,) = (line for line in lines if line["workload"] == "exchange")
        assert {pair["over"] for pair in exchange["exchange"]["pairs"]} == {"ucx"}
    text = page.read_text()
    for words in ("GPU hours", "mean utilisation"):
        assert words in text
    assert ("Exchange between workers" in text) == (len(gpus) > 1)


def test_a_packed_matrix_is_not_unpacked_in_memory(gpus: list[Gpu]) -> None:
    packed = 10 * 10**9 * len(gpus)
    with most_used() as most:
        argv = ["--size", f"{4 * packed}B", "--packed", "--repeats", "1"]
        bench("svd", *argv, runner=("--rmm-pool-size", "0"))
    # Contexts, UCX, scratch, and what the rates of the devices are measured with
    assert packed < max(most) < packed + 7 * 10**9 * len(gpus)
