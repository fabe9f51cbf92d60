"""The programs in examples/ run unchanged, and their results are right: they check them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdask.gpu.driver import has_nvidia_driver
from launching import unavailable
from running import Site

pytestmark = pytest.mark.mpi
EXAMPLES = Path(__file__).parents[2] / "examples"
#: Programs, what they need, and how their output begins.
FOUND = {
    "futures": ("numpy", "283146 primes below 4000000, on 2 workers: [(1, 70779), "),
    "grid_search": ("sklearn", "best of 6: {'C': 1, 'gamma': 0.001}, on 2 workers"),
    "ring_allreduce": ("numpy", "all-reduce of 100000 numbers, on 2 workers: 14999850000"),
    "xgboost_dask": ("xgboost", "boosted trees: 40 of 200000 rows, on 2 workers, mean error 0.01"),
    "monthly_means": ("flox", "monthly means of 473 MB, on 2 workers: (12, 90, 180)"),
    "dataframe": ("pyarrow", "pandas, on 2 workers: {'east': 4900000, 'north': 4800000, "),
}
#: Runs programs one after the other, on one cluster.
ALL = """
import runpy, sys
for path in sys.argv[1:]:
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")
"""


@pytest.mark.slow
def test_examples(site: Site) -> None:
    missing = [needs for needs, _ in FOUND.values() if importlib.util.find_spec(needs) is None]
    if missing:
        unavailable(f"{' '.join(missing)} not installed: run `make venv`")
    (site.folder / "all.py").write_text(ALL)
    paths = [EXAMPLES / f"{name}.py" for name in FOUND]
    ended = site.run("all.py", *paths)
    lines = ended.out.splitlines()
    assert len(lines) == len(FOUND) + 1, str(ended)  # the accuracy has one of its own
    for _, found in FOUND.values():
        assert sum(line.startswith(found) for line in lines) == 1, str(ended)


@pytest.mark.long
def test_a_wrong_result_is_a_failure(site: Site) -> None:
    text = (EXAMPLES / "futures.py").read_text()
    assert "= 4_000_000, 100_000, 8\n" in text
    wrong = text.replace("= 4_000_000, 100_000, 8\n", "= 200_000, 50_000, 8\n")
    assert "wrong: [(1, 70779), (2, 1), " in site.run(program=wrong, code=1).err


@pytest.mark.long
def test_the_bench_is_a_program_too(site: Site) -> None:
    bench = ["-m", "hpcdask.bench"]
    line = json.loads(site.run(*bench, "array", "--size", "8MB", "--repeats", "1").out)
    assert (line["workload"], line["bytes"], line["workers"]) == ("array", 8_000_000, 2)
    ended = site.run(*bench, "svd", "--size", "1", code=2)
    assert "hpcdask: error: size 1 B is too small" in ended.err


@pytest.mark.skipif(has_nvidia_driver(), reason="takes all GPUs, which tests/gpu measures")
def test_the_demo_ends_with_a_table():
    """Regression: it ended with a traceback in place of the table."""
    demo = Path(__file__).parents[1] / "tools/demo.sh"
    words = ["bash", str(demo), os.path.dirname(sys.executable)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert any(row.startswith("array, tuned") and "%" in row for row in rows), done.stdout
    assert any(row.startswith("svd, tuned") and "%" in row for row in rows)
