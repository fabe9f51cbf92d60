"""A keyword of the cluster classes and an option of workers: each is added in two files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hpcdask

#: By file, lines and what they are put before; and a program that uses what they add.
KEYWORD = {
    "clusters/keywords.py": {
        "    poll_interval: Annotated[": "    toy: Annotated[str | None, 'Colour of a toy.']\n"
    },
    "clusters/options.py": {
        "    poll_interval_s: float\n": "    toy: str | None\n",
        "            poll_interval_s=": '            toy=settings.get("toy"),\n',
    },
}
KEYWORD_IS_READ = """
assert "Colour of a toy." in inspect.getdoc(hpcdask.SLURMCUDACluster)
assert (read(toy="red").toy, read().toy) == ("red", None)
with dask.config.set({"jobqueue.slurm.toy": "blue"}):
    assert read().toy == "blue"
"""
OPTION = {
    "spec/keywords.py": {"    nthreads: int | None\n": "    toy: int | None\n"},
    "spec/specs.py": {
        "    nthreads: int | None = _option(": (
            '    toy: int | None = _option("Number of toys.", parse_count)\n'
        )
    },
}
OPTION_IS_READ = """
assert "Number of toys." in inspect.getdoc(hpcdask.SLURMCUDACluster)
(group,) = read(toy="3").groups.values()
assert group.spec.toy == 3
assert "--toy 3" in " ".join(group.spec.to_argv())
try:
    read(toy="none")
except hpcdask.errors.UsageError as error:
    print(error)
from hpcdask.runner.options import command
print(command().params)
"""
START = """
import inspect, dask, hpcdask
from hpcdask.clusters.options import ClusterOptions

def read(**keywords):
    keywords = dict(cores=1, memory="1GiB", device="cpu") | keywords
    return ClusterOptions.read(hpcdask.SLURMCUDACluster, keywords)

assert "toy" in inspect.signature(hpcdask.SLURMCUDACluster).parameters
"""


@pytest.mark.parametrize(
    ("files", "program", "words"),
    [
        (KEYWORD, KEYWORD_IS_READ, []),
        (OPTION, OPTION_IS_READ, ["toy: 'none' is not a whole number", "<Option toy>"]),
    ],
    ids=["keyword", "option"],
)
def test_two_files_add_it(tmp_path: Path, files: dict, program: str, words: list[str]) -> None:
    package = tmp_path / "hpcdask"
    shutil.copytree(Path(hpcdask.__file__).parent, package)
    for name, lines in files.items():
        text = (package / name).read_text()
        for place, line in lines.items():
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
    )
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in words), done.stdout
