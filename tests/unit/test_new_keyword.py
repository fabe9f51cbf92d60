"""A keyword of the cluster classes and an option of workers: each is added in two files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hpcdask

#: By file, the line before which lines are put, and those lines.
KEYWORD = {
    "clusters/keywords.py": [
        ("    poll_interval: Annotated[", "    toy: Annotated[str | None, 'Colour of a toy.']\n"),
    ],
    "clusters/options.py": [
        ("    poll_interval_s: float\n", "    toy: str | None\n"),
        ("            poll_interval_s=", '            toy=settings.get("toy"),\n'),
    ],
}
OPTION = {
    "spec/keywords.py": [("    nthreads: int | None\n", "    toy: int | None\n")],
    "spec/specs.py": [
        (
            "    nthreads: int | None = _option(",
            '    toy: int | None = _option("Number of toys.", parse_count)\n',
        )
    ],
}
START = """
import inspect
import dask
import hpcdask
from hpcdask.cli import main
from hpcdask.clusters.options import ClusterOptions

def read(**keywords):
    keywords = dict(cores=1, memory="1GiB", device="cpu") | keywords
    return ClusterOptions.read(hpcdask.SLURMCUDACluster, keywords)

def printed(*words):
    try:
        main(words)
    except SystemExit as end:
        assert not end.code

assert "toy" in inspect.signature(hpcdask.SLURMCUDACluster).parameters
"""
KEYWORD_IS_READ = """
assert "Colour of a toy." in inspect.getdoc(hpcdask.SLURMCUDACluster)
assert read(toy="red").toy == "red"
assert read().toy is None
with dask.config.set({"jobqueue.slurm.toy": "blue"}):
    assert read().toy == "blue"
"""
OPTION_IS_READ = """
assert "Number of toys." in inspect.getdoc(hpcdask.SLURMCUDACluster)
(group,) = read(toy="3").groups.values()
assert group.spec.toy == 3
assert "--toy 3" in " ".join(group.spec.to_argv())
try:
    read(toy="none")
except hpcdask.errors.UsageError as error:
    assert "toy: 'none' is not a whole number" in str(error)
else:
    raise AssertionError
printed("run", "--help-all")
"""


@pytest.mark.parametrize(
    ("files", "program", "help_text"),
    [(KEYWORD, KEYWORD_IS_READ, ""), (OPTION, OPTION_IS_READ, "--toy N")],
)
def test_two_files_add_it(
    tmp_path: Path, files: dict[str, list[tuple[str, str]]], program: str, help_text: str
) -> None:
    package = tmp_path / "hpcdask"
    shutil.copytree(Path(hpcdask.__file__).parent, package)
    for name, lines in files.items():
        text = (package / name).read_text()
        for place, line in lines:
            assert text.count(place) == 1, (name, place)
            text = text.replace(place, line + place)
        (package / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", START + program],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert help_text in done.stdout
