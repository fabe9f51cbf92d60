"""What is released: the source distribution builds the wheel, and each holds what it should."""

from __future__ import annotations

import stat
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from building import ROOT, Built, build

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("built"))


def test_wheel(built: Built):
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        told = message_from_bytes(archive.read(metadata))
        scripts = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode()
    info = metadata.partition("/")[0]
    in_checkout = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "hpcdask").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if not name.startswith(info)} == in_checkout
    assert "hpcdask/py.typed" in names
    assert "hpcdask = hpcdask.cli:main" in scripts
    assert f"{info}/licenses/LICENSE" in names

    assert built.wheel.name.endswith("-py3-none-any.whl")
    assert told["Requires-Python"].replace(" ", "") in (">=3.11,<3.15", "<3.15,>=3.11")
    assert told["License-Expression"] == "BSD-3-Clause"
    assert set(told.get_all("Provides-Extra")) == set(PROJECT["project"]["optional-dependencies"])
    base = [line for line in told.get_all("Requires-Dist") if "extra ==" not in line]
    assert len(base) == len(PROJECT["project"]["dependencies"])
    assert not [line for line in base if "cu1" in line or "cuda" in line]
    assert "python -m hpcdask.run" in told.get_payload()


def test_source_distribution(built: Built):
    with tarfile.open(built.sdist) as tar:
        members = {Path(*Path(member.name).parts[1:]): member for member in tar}
    names = set(map(str, members))
    wanted = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    for name in ("pyproject.toml", "README.md", "LICENSE", "PKG-INFO", *wanted):
        assert name in names or any(path.startswith(f"{name}/") for path in names), name
    # What tests need that is no module
    for name in ("tests/mpi/programs", "tests/fakes", "tests/tools/install-programs.sh"):
        assert any(path.startswith(name) for path in names), name
    assert members[Path("hpcdask/py.typed")].size == 0

    for path, member in members.items():
        assert not set(path.parts) & {"__pycache__", "_build", ".git", ".venv"}, path
        assert not stat.S_IMODE(member.mode) & 0o022, path
    assert sum(member.size for member in members.values()) < 20e6
