"""The tests of dask-jobqueue and dask-mpi, as they are, with hpcdask in their place.

What may fail stands in known.toml, with the reason. The suites come from the packages' source
distributions, which `make programs` unpacks outside of this repository.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from clock import stretched
from launching import clean_environment, leftovers, unavailable, wait_for

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# read before a test has a home of its own
SUITES = Path(os.environ.get("HPCDASK_PEERS") or Path.home() / ".cache" / "hpcdask-peers")
KNOWN = tomllib.loads((HERE / "known.toml").read_text())
FETCH = ["bash", str(ROOT / "tests/tools/fetch-peers.sh"), sys.executable, str(SUITES)]


@pytest.fixture
def suites() -> Path:
    said = subprocess.run(FETCH, capture_output=True, text=True, timeout=300)
    if not (SUITES / "complete").exists():
        unavailable(f"no source distributions of the peers: {said.stdout.strip()[-500:]}")
    return SUITES


def run(
    suites: Path, package: str, folder: Path, *words: str, first: Sequence[Path] = (), **env: str
) -> dict[str, str]:
    """Run a package's tests, and return how each ended: passed, skipped, failed or error.

    What stands in `first` comes before the package on the paths of its modules and commands.
    """
    tests = suites / package / package.replace("-", "_") / "tests"
    marker = f"peers-{os.getpid()}-{folder.name}"
    paths = [*first, HERE, ROOT, suites / package]
    commands = [*(str(folder / "bin") for folder in first), str(HERE / "bin")]
    waits = [name for one in KNOWN[package] if not one.get("ends", True) for name in one["tests"]]
    report = folder / "report.xml"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", str(tests), "--rootdir", str(tests)),
            *("-c", os.devnull),
            *("-q", "--tb=short", "-p", "no:cacheprovider", "--timeout", str(stretched(15))),
            *("-o", "junit_family=xunit1", "--junitxml", str(report), *words),
            *(f"--deselect={name.replace('::', '.py::')}" for name in waits),
        ],
        cwd=folder,
        env={
            **clean_environment(),
            "PATH": os.pathsep.join([*commands, clean_environment()["PATH"]]),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PEERS_MARKER": marker,
            **env,
        },
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode in (0, 1), done.stdout[-4000:] + done.stderr[-2000:]
    wait_for(lambda: not leftovers(marker), 20, "the processes of the suite to end")
    print(done.stdout[-20000:])
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        found[name] = next((child.tag for child in case if child.tag in OTHERS), "passed")
    return found


OTHERS = {"failure", "error", "skipped"}


def compare(found: dict[str, str], package: str) -> None:
    """What fails is in the table, and what is in the table fails."""
    entries = [entry for entry in KNOWN[package] if entry.get("ends", True)]
    named = [name for entry in entries for name in entry["tests"]]
    assert len(named) == len(set(named))
    covered = {
        name: [one for one in found if name in (one, one.partition("[")[0])] for name in named
    }
    passes = {
        name: ones
        for name, ones in covered.items()
        if not any(found[one] in ("failure", "error") for one in ones)
        or any(found[one] == "passed" for one in ones)
    }
    excused = {one for ones in covered.values() for one in ones}
    fails = [one for one, end in found.items() if end in ("failure", "error")]
    assert sorted(set(fails) - excused) == [], "a promise broken, or a line for known.toml"
    assert passes == {}, "in known.toml, and does not fail"


def test_every_reason_is_a_private_part_or_on_the_page() -> None:
    page = " ".join((ROOT / "docs/launching.md").read_text().split())
    for package, entries in KNOWN.items():
        for entry in entries:
            kind, _, text = entry["because"].partition(": ")
            assert kind in ("private", "docs"), entry
            assert kind == "private" or text in page, (package, text)


@pytest.mark.long
@pytest.mark.slow
def test_dask_jobqueue(suites: Path, tmp_path: Path) -> None:
    # test_runner.py is about its AsyncRunner, for which hpcdask.Runner is another thing
    words = ["-p", "jobqueue_plugin", "-k", "not test_runner"]
    found = run(suites, "dask-jobqueue", tmp_path, *words)
    assert list(found.values()).count("passed") > 90, found
    compare(found, "dask-jobqueue")


@pytest.mark.slow
@pytest.mark.long
def test_dask_mpi(suites: Path, tmp_path: Path) -> None:
    found = run(
        suites,
        "dask-mpi",
        tmp_path,
        first=[HERE / "mpi"],
        ALLOW_RUN_AS_ROOT="1",
        PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",
    )
    assert list(found.values()).count("passed") >= 8, found
    compare(found, "dask-mpi")
