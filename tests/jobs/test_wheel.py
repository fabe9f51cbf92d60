"""What is released: the source distribution builds the wheel, and each holds what it should."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from importlib.util import find_spec
from pathlib import Path

import pytest

from launching import unavailable

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that was made from it."""
    folder = tmp_path_factory.mktemp("built")
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    if find_spec("hatchling") is None:
        tools = env["PYTHONPATH"] = str(folder / "tools")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"]
        if subprocess.run([*command, "--target", tools, "hatchling>=1.24"], check=False).returncode:
            unavailable("hatchling is not installed, and pip cannot install it")

    def make(kind: str, pattern: str, source: Path) -> Path:
        command = [sys.executable, "-m", "hatchling", "build", "--target", kind]
        done = subprocess.run(
            [*command, "--directory", folder], cwd=source, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (path,) = folder.glob(pattern)
        return path

    sdist = make("sdist", "*.tar.gz", ROOT)
    (folder / "source").mkdir()
    subprocess.run(["tar", "-xf", sdist, "-C", folder / "source"], check=True)
    (source,) = (folder / "source").iterdir()
    return sdist, make("wheel", "*.whl", source)


def test_wheel(built: tuple[Path, Path]):
    _, wheel = built
    with zipfile.ZipFile(wheel) as archive:
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

    assert wheel.name.endswith("-py3-none-any.whl")
    assert told["Requires-Python"].replace(" ", "") in (">=3.11,<3.15", "<3.15,>=3.11")
    assert told["License-Expression"] == "BSD-3-Clause"
    assert set(told.get_all("Provides-Extra")) == set(PROJECT["project"]["optional-dependencies"])
    base = [line for line in told.get_all("Requires-Dist") if "extra ==" not in line]
    assert len(base) == len(PROJECT["project"]["dependencies"])
    assert not [line for line in base if "cu1" in line or "cuda" in line]
    assert "python -m hpcdask.run" in told.get_payload()


def test_source_distribution(built: tuple[Path, Path]):
    with tarfile.open(built[0]) as tar:
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
