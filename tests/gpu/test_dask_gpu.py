"""dask's own tests of CuPy arrays, computed on a cluster; what fails without one does not count.

All of them take longer than ten minutes, so as many as `TESTS` in the environment are drawn.

Their arrays have names of their own here. Many tests call theirs "A", and on any cluster one can
get what is left of the "A" of another.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import dask.array
import pytest

from gpu_launching import launch
from hpcdask.gpu.devices import Gpu

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

#: `assert_eq` computes with the synchronous scheduler, unless it is told another one.
PROGRAM = """
import functools, itertools, json, random, sys
import dask.array as da
import dask.array.utils as utils
import pytest

def from_array(x, *args, real=da.from_array, count=itertools.count(), **kwargs):
    if isinstance(kwargs.get("name"), str):
        kwargs["name"] += f"-{next(count)}"
    return real(x, *args, **kwargs)

da.from_array = from_array

class Failures:
    def __init__(self, count):
        self.failed, self.passed, self.count = [], 0, count
    def pytest_collection_modifyitems(self, items):
        random.Random(1).shuffle(items)
        items[:] = items[: self.count]
        self.path = {item.nodeid: f"{item.path}::{item.nodeid.split('::', 1)[1]}" for item in items}
    def pytest_runtest_logreport(self, report):
        self.passed += report.passed and report.when == "call"
        if report.failed:
            self.failed.append(self.path[report.nodeid])

def run(tests, count=None):
    seen = Failures(count)
    options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "-c", "/dev/null"]
    options += ["--durations=10"]
    pytest.main([*options, *tests], plugins=[seen])
    return seen

from distributed import Client
with Client() as client:
    utils.assert_eq = functools.partial(utils.assert_eq, scheduler=client)
    seen = run(sys.argv[3:], int(sys.argv[2]))
utils.assert_eq = utils.assert_eq.func
for name in [name for name in sys.modules if ".test_cupy_" in name]:
    del sys.modules[name]
alone = run(seen.failed).failed if seen.failed else []
with open(sys.argv[1], "w") as file:
    json.dump({"passed": seen.passed, "failed": sorted({*seen.failed} - {*alone})}, file)
"""


def test_dask_s_tests_of_cupy_pass_on_a_cluster(gpus: list[Gpu], tmp_path: Path) -> None:
    tests = sorted(map(str, (Path(dask.array.__file__).parent / "tests").glob("test_cupy_*.py")))
    assert tests
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    count = os.environ.get("TESTS", "60")
    arguments = [str(tmp_path / "seen.json"), count, *tests]
    done = launch(1, str(program), *arguments, timeout=300)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["failed"] == [], done.stdout
    assert seen["passed"] > int(count) / 2, done.stdout  # some are skipped
