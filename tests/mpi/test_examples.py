"""The programs in examples/ run unchanged, and their results are right: they check them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from clock import stretched
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
    ended = site.run(str(site.folder / "all.py"), *map(str, paths), find=False, timeout=90)
    assert ended.code == 0, str(ended)
    lines = ended.out.splitlines()
    assert len(lines) == len(FOUND) + 1, str(ended)  # the accuracy has one of its own
    for _, found in FOUND.values():
        assert sum(line.startswith(found) for line in lines) == 1, str(ended)


@pytest.mark.long
def test_a_wrong_result_is_a_failure(site: Site) -> None:
    program = site.folder / "futures.py"
    text = (EXAMPLES / "futures.py").read_text()
    assert "= 4_000_000, 100_000, 8\n" in text
    program.write_text(text.replace("= 4_000_000, 100_000, 8\n", "= 200_000, 50_000, 8\n"))
    ended = site.run(program)
    assert ended.code == 1, str(ended)
    assert "wrong: [(1, 70779), (2, 1), " in ended.err


@pytest.mark.long
def test_a_workload_is_a_program_too(site: Site) -> None:
    """It ended at once, with exit code 0 and no result."""
    argv = ["-m", "hpcdask.workloads.array", "--size", "8MB", "--repeats", "1"]
    ended = site.run(*argv, find=False)
    assert ended.code == 0, str(ended)
    line = json.loads(ended.out)
    assert (line["workload"], line["bytes"], line["workers"]) == ("array", 8_000_000, 2)
    ended = site.run("-m", "hpcdask.workloads.svd", "--size", "1", find=False)
    assert ended.code == 2, str(ended)
    assert "hpcdask: error: size 1 B is too small" in ended.err


@pytest.mark.long
def test_the_launcher_s_time_is_not_that_of_the_bench(site: Site) -> None:
    """`mpirun hpcdask bench startup` imports the bench before it becomes the runner."""
    script = site.folder / "slow.py"
    script.write_text(SLOW_BENCH)
    done = site.launcher.popen(2, "python", str(script), cwd=site.folder, env=site.env)
    out, err = done.communicate(timeout=180)
    assert done.returncode == 0, err
    phases = {part["name"]: part["seconds"] for part in json.loads(out)["phases"]}
    assert phases["launcher"] < SLEEP_S, phases


SLEEP_S = stretched(4)
SLOW_BENCH = f"""
import sys, time
time.sleep({SLEEP_S})
from hpcdask.bench.command import main
sys.exit(main(["startup", "--device", "cpu"]))
"""
