"""Pack hpcdask and all it needs, for machines without a network.

``python tools/bundle.py WHEEL --python-version 3.12 --extras cuda13,mpi`` downloads what a WHEEL of
hpcdask needs, for that Python and platform, which need not be those of this machine, and makes one
archive of it: the wheels, their checksums and versions, and install.sh.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import NamedTuple

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

#: Older names of manylinux platforms, by the minor version of the glibc that they stand for.
ALIASES = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}
CUDA = ("cuda12", "cuda13")
INSTALL = """\
#!/bin/sh
# install.sh FOLDER [OPTION OF PIP...]: makes a virtual environment with @NAME@ in FOLDER,
# from the wheels beside this file alone. The Python is python@PYTHON@, or $PYTHON.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:?a folder for the environment}
shift
python=${PYTHON:-python@PYTHON@}
command -v "$python" >/dev/null || {
    echo "install.sh: there is no $python here: load its module, or name one: PYTHON=..." >&2
    exit 1
}
"$python" -c '
import platform, sys
here = "%d.%d" % sys.version_info[:2], platform.machine()
glibc = platform.libc_ver()[1]
if here != ("@PYTHON@", "@MACHINE@"):
    sys.exit("install.sh: the wheels are for Python @PYTHON@ on @MACHINE@, this is %s on %s" % here)
if [int(n) for n in glibc.split(".")] < [2, @GLIBC@]:
    sys.exit("install.sh: the wheels need glibc 2.@GLIBC@, this machine has %s" % glibc)
'
(cd "$here" && sha256sum --check --quiet SHA256SUMS)
# Not all Pythons can bring pip into the environment themselves
"$python" -m venv --without-pip "$folder"
# --isolated: no setting of pip sends it to a network
"$folder/bin/python" "$here"/wheels/@PIP@/pip --isolated --disable-pip-version-check \\
    install --quiet --no-index --find-links "$here/wheels" "$@" pip @REQUIREMENTS@
echo "@NAME@ is installed: . $folder/bin/activate"
"""


class Problem(Exception):
    """What ends the program with one line."""


class Target(NamedTuple):
    """The machines that the bundle is for."""

    python: str
    glibc: int
    machine: str

    @classmethod
    def read(cls, python: str, platform: str) -> Target:
        """From ``3.12`` and ``manylinux_2_28_x86_64``."""
        found = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", platform)
        if found is None:
            raise Problem(f"platform {platform}: such as manylinux_2_28_x86_64")
        if not re.fullmatch(r"3\.\d+", python):
            raise Problem(f"Python version {python}: such as 3.12")
        return cls(python, int(found[1]), found[2])

    def platforms(self) -> list[str]:
        """All platforms whose wheels run there, the newest first."""
        names = []
        for minor in range(self.glibc, 4, -1):
            names.append(f"manylinux_2_{minor}_{self.machine}")
            if minor in ALIASES:
                names.append(f"{ALIASES[minor]}_{self.machine}")
        return names

    def markers(self) -> dict[str, str]:
        """The environment of the conditions in a wheel's list of requirements."""
        return {
            **{name: str(value) for name, value in default_environment().items()},
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "implementation_version": f"{self.python}.0",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "implementation_name": "cpython",
            "platform_system": "Linux",
            "sys_platform": "linux",
            "os_name": "posix",
        }


class Wheel(NamedTuple):
    """What a wheel says of itself."""

    version: Version
    python: SpecifierSet
    extras: set[str]
    requirements: list[Requirement]

    @classmethod
    def read(cls, path: Path) -> Wheel:
        """From the wheel's metadata."""
        with zipfile.ZipFile(path) as archive:
            names = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = message_from_bytes(archive.read(next(names)))
        return cls(
            Version(metadata["Version"]),
            SpecifierSet(metadata.get("Requires-Python", "")),
            set(metadata.get_all("Provides-Extra", ())),
            [Requirement(line) for line in metadata.get_all("Requires-Dist", ())],
        )


def read_wheels(folder: Path) -> dict[str, Wheel]:
    """The wheels of a folder by the names of their packages."""
    return {
        parse_wheel_filename(path.name)[0]: Wheel.read(path)
        for path in sorted(folder.glob("*.whl"))
    }


def lacking(folder: Path, roots: list[str], target: Target) -> list[Requirement]:
    """What these packages need on the target and the folder does not have.

    pip applies conditions such as ``python_version < "3.12"`` to the Python that it runs in, also
    when it downloads for another one.
    """
    wheels = read_wheels(folder)
    missing: list[Requirement] = []
    open_ends = [Requirement(root) for root in roots]
    done: set[tuple[str, str]] = set()
    while open_ends:
        wanted = open_ends.pop()
        package = canonicalize_name(wanted.name)
        wheel = wheels.get(package)
        if wheel is None or not wanted.specifier.contains(wheel.version, prereleases=True):
            missing.append(wanted)
            continue
        for extra in {"", *wanted.extras} - {extra for key, extra in done if key == package}:
            done.add((package, extra))
            environment = {**target.markers(), "extra": extra}
            for requirement in wheel.requirements:
                if requirement.marker is None or requirement.marker.evaluate(environment):
                    requirement.marker = None
                    open_ends.append(requirement)
    return missing


def download(wheel: Path, bracket: str, more: list[str], target: Target, folder: Path) -> None:
    """Download what the wheel and more need on the target into the folder, and themselves."""
    wanted = [f"{wheel}{bracket}", "pip", *more]
    for _ in range(5):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder)]
        command += ["--disable-pip-version-check", "--only-binary", ":all:"]
        command += ["--implementation", "cp", "--python-version", target.python]
        for platform in target.platforms():
            command += ["--platform", platform]
        if subprocess.run([*command, *wanted], check=False).returncode:
            raise Problem(
                f"pip found no set of wheels for Python {target.python} on {target.platforms()[0]}"
            )
        missing = lacking(folder, [f"hpcdask{bracket}", *more], target)
        if not missing:
            return
        wanted += sorted(set(map(str, missing)))
    raise Problem(f"these are needed and cannot be had together: {', '.join(map(str, missing))}")


def pack(wheel: Path, extras: list[str], more: list[str], target: Target, folder: Path) -> Path:
    """Make the archive in the folder; return its path."""
    own = Wheel.read(wheel)
    if unknown := set(extras) - own.extras:
        has = ", ".join(sorted(own.extras))
        raise Problem(f"hpcdask has no extra {', '.join(unknown)}. It has: {has}")
    if not own.python.contains(f"{target.python}.0"):
        raise Problem(f"hpcdask needs Python {own.python}, not {target.python}")
    if set(CUDA) <= set(extras):
        raise Problem(f"{' and '.join(CUDA)} exclude each other")
    kind = "" if set(CUDA) & set(extras) else "cpu"
    label = "-".join(filter(None, (kind, *extras)))
    name = f"hpcdask-{own.version}-py{target.python}-{label}-{target.platforms()[0]}"
    root = folder / name
    shutil.rmtree(root, ignore_errors=True)
    bracket = f"[{','.join(extras)}]" if extras else ""
    download(wheel, bracket, more, target, root / "wheels")

    wheels = sorted((root / "wheels").iterdir())
    versions = [
        f"{name}=={wheel.version}\n" for name, wheel in read_wheels(root / "wheels").items()
    ]
    (root / "versions.txt").write_text("".join(versions))
    (pip,) = (path.name for path in wheels if path.name.startswith("pip-"))
    install = INSTALL
    for word, value in {
        "NAME": name,
        "PYTHON": target.python,
        "MACHINE": target.machine,
        "GLIBC": str(target.glibc),
        "PIP": pip,
        "REQUIREMENTS": shlex.join([f"hpcdask{bracket}=={own.version}", *more]),
    }.items():
        install = install.replace(f"@{word}@", value)
    (root / "install.sh").write_text(install)
    (root / "install.sh").chmod(0o755)
    listed = [*wheels, root / "versions.txt", root / "install.sh"]
    sums = [f"{_sha256(path)}  {path.relative_to(root)}\n" for path in listed]
    (root / "SHA256SUMS").write_text("".join(sums))

    archive = folder / f"{name}.tar"  # wheels are compressed already
    with tarfile.open(archive, "w") as tar:
        tar.add(root, name, filter=_nobody)
    shutil.rmtree(root)
    return archive


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _nobody(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Whoever unpacks it owns it."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode = 0o755 if info.isdir() or info.mode & 0o100 else 0o644
    return info


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path, help="of hpcdask")
    parser.add_argument(
        "--python-version",
        default="{}.{}".format(*sys.version_info),
        help="of the machines that it is for (default: this one's, %(default)s)",
    )
    parser.add_argument(
        "--platform",
        default=f"manylinux_2_28_{os.uname().machine}",
        help="theirs (default: %(default)s)",
    )
    parser.add_argument(
        "--extras", default="", help="of hpcdask, such as cuda13,mpi (default: none)"
    )
    parser.add_argument(
        "--with",
        dest="more",
        default="",
        metavar="REQUIREMENTS",
        help="what else to pack and install, such as 'cupy-cuda13x[ctk] scikit-learn'",
    )
    parser.add_argument("--folder", type=Path, default=Path("dist"), help="for the archive")
    options = parser.parse_args()
    extras = [extra for extra in re.split(r"[ ,]+", options.extras) if extra not in ("", "cpu")]
    try:
        target = Target.read(options.python_version, options.platform)
        more = options.more.split()
        archive = pack(options.wheel.resolve(), extras, more, target, options.folder)
    except Problem as problem:
        sys.exit(f"bundle: {problem}")
    size = archive.stat().st_size / 1e6
    print(f"{archive} ({size:.0f} MB)")


if __name__ == "__main__":
    main()
