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
#: Instructions that a Dockerfile may use, and sections of a definition file.
INSTRUCTIONS = {"ARG", "FROM", "RUN", "COPY", "ENV", "CMD"}
SCRIPTS = {"post", "environment", "test", "runscript"}
SECTIONS = {*SCRIPTS, "arguments", "files", "help"}


def dockerfile() -> list[tuple[str, str]]:
    """Its instructions with their arguments."""
    text = (ROOT / "containers" / "Dockerfile").read_text()
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


def definition() -> tuple[dict[str, str], dict[str, str]]:
    """Its header, and its sections."""
    text = (ROOT / "containers" / "hpcdask.def").read_text()
    head, *parts = re.split(r"^%(\w+)[ \t]*\n", text, flags=re.MULTILINE)
    header = dict(re.findall(r"^(\w+): *(.+)$", head, re.MULTILINE))
    assert len(parts) == 2 * len(set(parts[::2]))
    return header, dict(zip(parts[::2], parts[1::2], strict=True))


def arguments() -> dict[str, str]:
    """The arguments of the definition file with their values."""
    return dict(line.split("=", 1) for line in definition()[1]["arguments"].split())


def commands(script: str) -> list[list[str]]:
    """The simple commands of a script without control flow."""
    lines = re.sub(r"^\s*#.*\n", "", script, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    simple = [part for line in lines for part in line.split("&&") if part.strip()]
    return [shlex.split(part) for part in simple]


def scripts() -> dict[str, list[list[str]]]:
    """The commands that make each image."""
    post = re.sub(r"{{ (\w+) }}", r"${\1}", definition()[1]["post"])
    run = "\n".join(text for name, text in dockerfile() if name == "RUN")
    return {"Dockerfile": commands(run), "hpcdask.def": commands(post)}


def test_dockerfile():
    lines = dockerfile()
    assert {name for name, _ in lines} <= INSTRUCTIONS
    assert [name for name, _ in lines[:3]] == ["ARG", "FROM", "ARG"]
    defaults = dict(text.split("=", 1) for name, text in lines if name == "ARG")
    assert defaults == arguments()
    assert defaults["CUDA"] in CUDA
    for name, text in lines:
        if name == "RUN":
            check_shell(text, "sh")
        if name == "COPY":
            *sources, target = text.split()
            assert target.startswith("/src/")
            assert all((ROOT / source).exists() for source in sources)


def test_definition():
    header, sections = definition()
    assert header == {"Bootstrap": "docker", "From": "{{ BASE }}"}
    assert set(sections) == SECTIONS
    used = set(re.findall(r"{{ (\w+) }}", header["From"] + sections["post"]))
    assert used == set(arguments())
    for name in SCRIPTS:
        check_shell(re.sub(r"{{ \w+ }}", "value", sections[name]), "sh")
    copied = [line.split() for line in sections["files"].splitlines() if line.strip()]
    assert all((ROOT / source).exists() and target == f"/src/{source}" for source, target in copied)
    by_docker = [text.split()[:-1] for name, text in dockerfile() if name == "COPY"]
    assert {source for source, _ in copied} == {source for part in by_docker for source in part}


def check_shell(text: str, shell: str) -> None:
    for program in (shell, "bash"):
        done = subprocess.run([program, "-n"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["Dockerfile", "hpcdask.def"])
@pytest.mark.parametrize("cuda", CUDA)
def test_what_pip_installs_is_what_the_project_declares(kind: str, cuda: str):
    (install,) = (words for words in scripts()[kind] if words[0].endswith("/pip"))
    _, verb, *rest = (word.replace("${CUDA}", cuda) for word in install)
    assert verb == "install"
    own, *others = (word for word in rest if not word.startswith("-"))
    path, extras = re.fullmatch(r"(/src)\[(.+)\]", own).groups()
    assert path == "/src"
    assert set(extras.split(",")) == {cuda, "mpi"} <= set(EXTRAS)
    declared = {Requirement(line).name for line in EXTRAS[cuda]}
    assert {Requirement(word).name for word in others} <= declared
