"""Ranks on a GPU beside ranks on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcdask.gpu.devices import Gpu
from launching import Launcher

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROGRAM = """
from distributed import Client

def make():
    import cupy
    return cupy.arange(1000)

def look(x):
    return type(x).__module__.partition(".")[0], int(x.sum())

with Client() as client:
    made = client.submit(make, resources={"GPU": 1})
    print(client.submit(look, made, resources={"GPU": 1}).result())
    print(client.submit(look, made, resources={"CPU": 1}).result())
"""


@pytest.mark.parametrize("ranks", [1, 3])
def test_data_go_from_the_gpu_to_the_cpu(
    gpus: list[Gpu], openmpi: Launcher, tmp_path: Path, ranks: int
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["-m", "hpcdask.run", "--groups", "gpu:1 cpu:2", "program.py"]
    if ranks == 1:
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        result = openmpi.run(ranks, "python", *words, cwd=tmp_path)
        code, out, err = result.code, result.out, result.err
    assert code == 0, err
    assert out.splitlines() == ["('cupy', 499500)", "('hpcdask', 499500)"]
    assert f"3 workers on 1 node (1 x {gpus[0].name}, 2 x CPU)" in err
