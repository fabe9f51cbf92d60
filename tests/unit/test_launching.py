"""The tests' own helpers, where a mistake would make another test flaky."""

import ast
from collections.abc import Iterator
from pathlib import Path

from launching import walk


def test_walk_goes_on_when_a_folder_vanishes(tmp_path: Path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    found = walk(tmp_path)
    folders = [next(found), next(found)]
    for folder in folders:
        (folder / "file").unlink()
        folder.rmdir()
    assert sorted(folders) == [tmp_path / "first", tmp_path / "second"]
    assert not list(found)


#: Functions that sleep by themselves, and why no claim depends on how long.
SLEEP = {
    "chaos/programs/notebook.py:slow": "a Dask task",
    "detached_cases.py:work": "a Dask task",
    "jobs/attached.py": "until it is killed",
    "jobs/attached.py:work": "a Dask task",
    "jobs/notebook.py": "until it is killed",
    "jobs/test_groups.py:slow": "a Dask task",
    "jobs/test_gang.py:run": "wherever it is just then",
    "jobs/test_worker.py:test_the_second_signal_ends_at_once": "longer than what counts once",
    "mpi/programs/embedded.py:interrupt": "longer than what counts once",
    "mpi/programs/embedded.py:work": "until it is interrupted",
    "mpi/programs/killed_worker.py:square": "a Dask task",
    "mpi/programs/waits.py": "until it is interrupted",
    "mpi/programs/waits.py:leave": "a program that takes its time to end",
    "mpi/test_ends.py:test_a_second_signal_ends_it_at_once": "longer than what counts once",
    "mpi/test_ucx.py:result": "after a failure",
    "unit/test_bench.py:measure": "until it gets a signal",
    "unit/test_termination.py:hand_over": "as long as it may",
}


def sleepers(node: ast.AST, where: str = "") -> Iterator[str]:
    """Yield the functions that sleep once, instead of again and again until something is so."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.While | ast.For | ast.Lambda):  # a lambda is a Dask task
            continue
        if isinstance(child, ast.Call) and ast.unparse(child.func).endswith(".sleep"):
            yield from [where] * (ast.unparse(child) != "asyncio.sleep(0)")
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from sleepers(child, f":{child.name}" if named else where)


def test_tests_wait_for_conditions():
    """One that sleeps and hopes fails on a busy machine: see `wait_for`, `until` and `clock`."""
    folder = Path(__file__).parents[1]
    found = {
        f"{path.relative_to(folder)}{where}"
        for path in folder.rglob("*.py")
        if path.parent.name != "gpu"
        for where in sleepers(ast.parse(path.read_text()))
    }
    assert found == set(SLEEP)
