"""The programs in examples/ run unchanged, and their results are right: they check them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from launching import unavailable
from running import Site

pytestmark = pytest.mark.mpi
EXAMPLES = Path(__file__).parents[2] / "examples"
#: Programs, what they need, and how their output begins.
FOUND = {
    "futures": ("numpy", "283146 primes below 4000000, on 2 workers: [(1, 70779), "),
    "grid_search": ("sklearn", "best of 6: {'C': 1, 'gamma': 0.001}, on 2 workers"),
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
    assert len(lines) == 4, str(ended)  # the accuracy has one of its own
    for _, found in FOUND.values():
        assert sum(line.startswith(found) for line in lines) == 1, str(ended)


def test_a_wrong_result_is_a_failure(site: Site) -> None:
    program = site.folder / "futures.py"
    text = (EXAMPLES / "futures.py").read_text()
    assert "= 4_000_000, 100_000, 8\n" in text
    program.write_text(text.replace("= 4_000_000, 100_000, 8\n", "= 200_000, 50_000, 8\n"))
    ended = site.run(program)
    assert ended.code == 1, str(ended)
    assert "wrong: [(1, 70779), (2, 1), " in ended.err
