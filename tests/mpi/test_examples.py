"""The programs in examples/ run unchanged, and their results are right: they check them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from launching import unavailable
from running import Site

pytestmark = pytest.mark.mpi
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "needs", "found"),
    [
        ("futures", "numpy", "283146 primes below 4000000, on 2 workers: [(1, 70779), "),
        (
            "grid_search",
            "sklearn",
            "best of 6: {'C': 1, 'gamma': 0.001}, on 2 workers\naccuracy 0.",
        ),
        ("dataframe", "pyarrow", "pandas, on 2 workers: {'east': 4900000, 'north': 4800000, "),
    ],
    ids=["futures", "grid_search", "dataframe"],
)
def test_example(site: Site, program: str, needs: str, found: str) -> None:
    if importlib.util.find_spec(needs) is None:
        unavailable(f"{needs} is not installed: run `make venv`")
    ended = site.run(EXAMPLES / f"{program}.py")
    assert ended.code == 0, str(ended)
    assert ended.out.startswith(found), str(ended)


def test_a_wrong_result_is_a_failure(site: Site) -> None:
    program = site.folder / "futures.py"
    text = (EXAMPLES / "futures.py").read_text()
    program.write_text(text.replace("is_prime = numbers > 1", "is_prime = numbers > 2"))
    ended = site.run(program)
    assert ended.code == 1, str(ended)
    assert "wrong: [(1, 70779), (2, 1), " in ended.err
