"""A bundle: what is in it for which machine, and that it installs and runs without a network."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from building import ROOT, build, unpack
from launching import Launcher, clean_environment, openmpi_launcher, unavailable

PROGRAM = ROOT / "tools" / "bundle.py"
PYTHON = "{}.{}".format(*sys.version_info)


def load():
    spec = importlib.util.spec_from_file_location("bundle", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bundle = load()
TARGET = bundle.Target.read("3.11", "manylinux_2_28_x86_64")
#: Nobody listens there.
CLOSED = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_EXTRA_INDEX_URL": "http://127.0.0.1:9/"}


INSTALLED = """
import importlib.metadata, hpcdask
print(hpcdask.__file__)
for one in importlib.metadata.distributions():
    print(f"{one.name}=={one.version}")
"""


def make_wheel(folder: Path, name: str, version: str, *requirements: str, extras=()) -> None:
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
    lines += [f"Provides-Extra: {extra}" for extra in extras]
    lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n\n")


def test_what_another_python_needs_is_not_forgotten(tmp_path: Path):
    make_wheel(
        tmp_path,
        "hpcdask",
        "1",
        "A_b[x]>=2",
        'old; python_version < "3.12"',
        'gone; python_version < "3.8"',
        'arm; platform_machine == "aarch64"',
        'cuda; extra == "cuda13"',
        extras=["cuda13"],
    )
    make_wheel(tmp_path, "a_b", "2.1", 'more; extra == "x"', 'not; extra == "y"', "hpcdask")

    def lacking(python: str, machine: str, extra: str = "", *more: str) -> set[str]:
        target = bundle.Target.read(python, f"manylinux_2_28_{machine}")
        return set(map(str, bundle.lacking(tmp_path, [f"hpcdask{extra}", *more], target)))

    assert lacking("3.11", "x86_64") == {"old", "more"}
    assert lacking("3.12", "x86_64", "[cuda13]", "a-b[y]") == {"cuda", "more", "not"}
    assert lacking("3.13", "aarch64") == {"arm", "more"}
    (tmp_path / "a_b-2.1-py3-none-any.whl").unlink()
    make_wheel(tmp_path, "a_b", "1.9")
    assert lacking("3.12", "x86_64") == {"A_b[x]>=2"}


def test_platforms():
    names = TARGET.platforms()
    assert names[0] == "manylinux_2_28_x86_64"
    assert names[-1] == "manylinux1_x86_64"
    assert "manylinux2014_x86_64" in names
    assert "manylinux_2_29_x86_64" not in names
    assert "manylinux2014_x86_64" not in bundle.Target.read("3.12", "manylinux_2_16_x86_64")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--extras", "cuda14"], "hpcdask has no extra cuda14. It has: cuda12, cuda13, mpi"),
        (["--extras", "cuda12,cuda13"], "cuda12 and cuda13 exclude each other"),
        (["--python-version", "3.9"], "hpcdask needs Python "),
        (["--python-version", "three"], "Python version three: such as 3.12"),
        (["--platform", "linux"], "platform linux: such as manylinux_2_28_x86_64"),
    ],
)
def test_refusals(tmp_path: Path, monkeypatch, options: list[str], message: str):
    extras = ["cuda12", "cuda13", "mpi"]
    make_wheel(tmp_path, "hpcdask", "1", extras=extras)
    path = tmp_path / "hpcdask-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        lines = ["Name: hpcdask", "Version: 1", "Requires-Python: >=3.11"]
        lines += [f"Provides-Extra: {extra}" for extra in extras]
        archive.writestr("hpcdask-1.dist-info/METADATA", "\n".join(lines) + "\n\n")
    monkeypatch.setattr(sys, "argv", ["bundle.py", str(path), "--folder", str(tmp_path), *options])
    with pytest.raises(SystemExit, match=r"^bundle: ") as caught:
        bundle.main()
    assert message in str(caught.value)
    assert os.listdir(tmp_path) == [path.name]


# --- for real -------------------------------------------------------------------------------------


def environment_without_network(tmp_path: Path) -> dict[str, str]:
    """No setting of pip leads anywhere, and no module of the tests' Python is found."""
    env = {k: v for k, v in clean_environment().items() if not k.startswith(("PIP_", "PYTHON"))}
    return {**env, **CLOSED, "PIP_CONFIG_FILE": "/dev/null", "HOME": str(tmp_path)}


def run(*command: str | os.PathLike[str], **options) -> subprocess.CompletedProcess[str]:
    words = list(map(os.fspath, command))
    return subprocess.run(
        words, capture_output=True, text=True, timeout=600, check=False, **options
    )


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.mpi
def test_it_installs_and_runs_without_a_network(tmp_path: Path):
    wheel = build(tmp_path / "built").wheel
    made = run(sys.executable, PROGRAM, wheel, "--folder", tmp_path / "out")
    if "No matching distribution found" in made.stderr or "Connection" in made.stderr:
        unavailable(f"pip finds no packages: {made.stderr[-300:]}")
    assert made.returncode == 0, made.stderr
    (archive,) = (tmp_path / "out").iterdir()
    assert str(archive) in made.stdout
    with tarfile.open(archive) as tar:
        assert {(member.uid, member.uname) for member in tar} == {(0, "")}
    unpack(archive, tmp_path / "node")
    (root,) = (tmp_path / "node").iterdir()
    assert root.name == archive.stem

    env = environment_without_network(tmp_path)
    install, folder = root / "install.sh", tmp_path / "an environment"
    refused = run(install, folder, env={**env, "PYTHON": "no-python"})
    assert refused.returncode == 1
    assert refused.stderr.startswith("install.sh: there is no no-python here: load its module")
    refused = run(install, folder, env={**env, "PYTHON": other_python(tmp_path)})
    assert refused.returncode == 1
    assert (
        f"install.sh: the wheels are for Python {PYTHON} on {os.uname().machine}, this is 3.99"
        in (refused.stderr)
    )
    assert not folder.exists()
    # What is imported here is compiled then
    done = run(install, folder, "--no-compile", env={**env, "PYTHON": sys._base_executable})
    assert done.returncode == 0, done.stdout + done.stderr

    python = folder / "bin" / "python"
    there, *installed = run(python, "-c", INSTALLED, env=env, cwd=tmp_path).stdout.splitlines()
    assert there.startswith(str(folder))
    versions = (root / "versions.txt").read_text().split()
    assert {line.lower().replace("_", "-") for line in installed} == set(versions)

    mpirun = openmpi_launcher()
    launcher = Launcher(
        mpirun.name, mpirun.prefix, {**mpirun.env, **env, "PATH": mpirun.env["PATH"]}
    )
    try:
        result = launcher.run(
            2,
            *(python, "-m", "hpcdask.run", "--device", "cpu"),
            *("-m", "hpcdask.bench", "array", "--size", "100MB", "--repeats", "1"),
            cwd=tmp_path,
            timeout=600,
        )
        assert result.code == 0, result.err
        (record,) = (json.loads(line) for line in result.out.splitlines() if "array" in line)
        assert record["workers"] == 2
        assert all(check["ok"] for check in record["checks"])
    finally:
        launcher.close()

    with (root / "versions.txt").open("a") as file:
        file.write("changed on the way\n")
    broken = run(install, tmp_path / "b", env={**env, "PYTHON": sys._base_executable})
    assert broken.returncode
    assert "versions.txt: FAILED" in broken.stdout


def other_python(tmp_path: Path) -> str:
    """A Python that says that it is another one."""
    path = tmp_path / "python3.99"
    path.write_text(
        f'#!/bin/sh\nshift\nexec {sys._base_executable} -c "import sys; '
        'sys.version_info = (3, 99); exec(sys.argv[1])" "$@"\n'
    )
    path.chmod(0o755)
    return str(path)
