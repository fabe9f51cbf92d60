"""Rechunks of CuPy arrays of many chunks, which dask alone would do by P2P, and that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_launching import launch, sharing
from hpcdask.gpu.devices import Gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

PROGRAM = """
import sys
import cupy
import dask, dask.array as da, numpy as np
from distributed import Client

dask.config.set({"array.chunk-size": "1 B"})  # else dask joins chunks before
client = Client()
client.wait_for_workers(2)
x = np.random.default_rng(1).random((512, 300))
y = da.from_array(x, (8, 300)).map_blocks(cupy.asarray, dtype=float, meta=cupy.empty((0, 0)))
columns = y.rechunk((512, 4))
spectrum = da.fft.fft(y.rechunk({0: -1, 1: 7}), axis=0)
print(np.array_equal(columns.compute().get(), x))
print(np.allclose(spectrum.compute().get(), np.fft.fft(x, axis=0)))
"""
ROOT = Path(__file__).parents[2]


def test_results_are_numpy_s(gpus: list[Gpu], tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = launch(2, *sharing(2, gpus), str(script), timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\nTrue\n"


@pytest.mark.parametrize("name", ["fft.py", "rechunk.py"])
def test_the_benchmarks_programs_are_right(gpus: list[Gpu], name: str) -> None:
    program = str(ROOT / "benchmarks" / "programs" / name)
    words = [program, "--workers", "2", "--runs", "2", "--sizes", "cpu"]
    done = launch(2, *sharing(2, gpus), *words, timeout=120)
    assert done.returncode == 0, done.stderr
    assert '"correct": true' in done.stdout
    assert '"correct": false' not in done.stdout
