"""The recipes of images: they parse, copy what is there, and install what the project declares.

No image is built here, which takes a container runtime and a network.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
CUDA = [name for name in EXTRAS if name.startswith("cuda")]


def dockerfile() -> tuple[dict[str, str], set[str], str]:
    """Return the Dockerfile's arguments, what it copies, and the shell script that it runs."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "containers/Dockerfile").read_text(), flags=re.M)
    lines = [line.split(None, 1) for line in text.replace("\\\n", " ").splitlines() if line]
    texts = {kind: [rest for name, rest in lines if name == kind] for kind, _ in lines}
    copied = {source for line in texts["COPY"] for source in line.split()[:-1]}
    return dict(one.split("=", 1) for one in texts["ARG"]), copied, "\n".join(texts["RUN"])


def definition() -> tuple[dict[str, str], set[str], str]:
    """Return the same of Apptainer's definition file, and all its scripts as one."""
    text = (ROOT / "containers/hpcdask.def").read_text()
    head, *parts = re.split(r"^%(\w+)[ \t]*\n", text, flags=re.MULTILINE)
    assert "\nBootstrap: docker\nFrom: {{ BASE }}\n" in head
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    copied = dict(line.split() for line in sections["files"].splitlines() if line.strip())
    assert copied == {source: f"/src/{source}" for source in copied}
    scripts = [sections[name] for name in ("post", "environment", "test", "runscript")]
    script = re.sub(r"{{ (\w+) }}", r"${\1}", "\n".join(scripts))
    return dict(one.split("=", 1) for one in sections["arguments"].split()), set(copied), script


def test_both_have_the_same_arguments_and_copy_the_same_which_is_there():
    assert dockerfile()[:2] == definition()[:2]
    arguments, copied, _ = dockerfile()
    assert arguments["CUDA"] in CUDA
    assert all((ROOT / source).exists() for source in copied)


@pytest.mark.parametrize("recipe", [dockerfile, definition])
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_their_scripts_are_shell(recipe, shell: str):
    done = subprocess.run([shell, "-n"], input=recipe()[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("recipe", [dockerfile, definition])
@pytest.mark.parametrize("cuda", CUDA)
def test_what_pip_installs_is_what_the_project_declares(recipe, cuda: str):
    (line,) = re.findall(r"/pip install (.*?)(?:&&|$)", recipe()[2], re.MULTILINE)
    words = shlex.split(line.replace("${CUDA}", cuda))
    own, *others = (word for word in words if not word.startswith("-"))
    extras = re.fullmatch(r"/src\[(.+)\]", own)[1]
    assert set(extras.split(",")) == {cuda, "mpi"} <= set(EXTRAS)
    declared = {Requirement(line).name for line in EXTRAS[cuda]}
    assert {Requirement(word).name for word in others} <= declared
