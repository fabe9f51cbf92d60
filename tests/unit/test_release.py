"""What a release is made by says the same of hpcdask as pyproject.toml. Nothing is published."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import yaml

import hpcdask

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MINORS = [line[-4:] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d\d$", line)]


def test_the_recipe_of_conda_wants_what_the_package_wants():
    recipe = yaml.safe_load((ROOT / "conda/recipe.yaml").read_text())
    assert recipe["context"]["version"] == hpcdask.__version__
    wanted = {re.sub(r"\[.*?\]", "-core", line) for line in PROJECT["dependencies"]}
    wanted |= {"numpy", f"python{PROJECT['requires-python']}"}
    there = {line.replace(" ", "") for line in recipe["requirements"]["run"]}
    assert {line.replace("python-xxhash", "xxhash") for line in there} == wanted
    assert recipe["about"]["summary"] == PROJECT["description"]


def test_the_workflow_runs_all_pythons_and_there_are_its_targets():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert jobs["tests"]["strategy"]["matrix"]["python"] == MINORS
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}
    lines = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    used = {word for line in lines for word in re.findall(r"^make ((?:[a-z]+ ?)+)", line)}
    there = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {target for words in used for target in words.split()} <= there


def test_a_release_without_a_distribution_is_refused(tmp_path: Path):
    (tmp_path / "hpcdask").mkdir()
    (tmp_path / "hpcdask/__init__.py").write_text('__version__ = "7.0"\n')
    done = subprocess.run(
        ["bash", ROOT / "tools/release.sh", "python3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "dist has no hpcdask 7.0: make dist\n")
