"""The code in the documentation runs as it stands there.

A block of Python or shell runs, unless a comment before it says why not:

    <!-- not run: needs SLURM -->           its syntax and its options are checked still
    <!-- from: examples/futures.py -->      it is a part of a program that has a test
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import dask
import pytest
from distributed import LocalCluster

from launching import clean_environment, unavailable

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- (?P<why>.*?) -->\n)?^```(?P<language>[a-z]+)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
SHELLS = ("bash", "sh")
#: Pages whose shell does not run, with the reason.
NOT_RUN = {"docs/submit.md": "needs a queue; the tests of hpcdask submit run such lines"}


class Block(NamedTuple):
    """A fenced block of a page, and why it does not run, if that is said."""

    page: str
    line: int
    language: str
    text: str
    why: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> Iterator[Block]:
    """Yield those of all pages."""
    for path in PAGES:
        page, text = str(path.relative_to(ROOT)), path.read_text()
        for found in BLOCK.finditer(text):
            line = text.count("\n", 0, found.start("language")) + 1
            why = found["why"]
            if why is None and page in NOT_RUN and found["language"] in SHELLS:
                why = f"not run: {NOT_RUN[page]}"
            yield Block(page, line, found["language"], found["text"], why)


BLOCKS = list(blocks())
PYTHON = [block for block in BLOCKS if block.language == "python"]
SHELL = [block for block in BLOCKS if block.language in SHELLS]
FIRST_PAGE = "docs/getting-started.md"


def test_every_block_runs_or_says_why_not():
    for block in PYTHON + SHELL:
        assert block.why is None or re.fullmatch(r"(not run|from): \S.*", block.why), block


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An empty folder, and a cluster for programs in it."""
    folder = tmp_path_factory.mktemp("docs")
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0"
        ) as cluster,
        dask.config.set({"scheduler-address": cluster.scheduler_address}),
    ):
        yield folder


@pytest.mark.parametrize("block", [block for block in PYTHON if block.why is None], ids=str)
def test_python(folder, monkeypatch, block):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    names: dict = {}
    try:
        exec(compile(block.text, str(block), "exec"), names)
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        unavailable("pandas is not installed")
    if "client" in names:
        names["client"].close()


@pytest.mark.parametrize("block", [block for block in PYTHON if block.why], ids=str)
def test_python_that_does_not_run_is_python(block):
    tree = ast.parse(block.text)
    if block.why.startswith("from: "):
        program = ast.parse((ROOT / block.why.removeprefix("from: ")).read_text())
        assert _parts(tree) <= _parts(program)


def _parts(tree: ast.Module) -> set[str]:
    """The statements of a program, and what those with a body begin with."""
    heads = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            if hasattr(node, "body"):
                node.body = []
            heads.add(ast.dump(node))
    return heads


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_shell_is_shell(block):
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def new_user(tmp_path_factory):
    """A home folder, where one block after the other runs, as a reader would type them."""
    home = tmp_path_factory.mktemp("new-user")
    env = clean_environment()
    env |= {"HOME": str(home), "TMPDIR": str(tmp_path_factory.mktemp("t"))}
    if os.geteuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return home, env


@pytest.mark.slow
@pytest.mark.long
def test_getting_started_line_by_line(new_user):
    home, env = new_user
    ran = ""
    for block in SHELL:
        if block.page == FIRST_PAGE and block.why is None:
            ran += _run(block, home, env)
    assert ran.count("mean 10.0") == 2  # by hand, and with mpirun
    assert ran.count("2 workers on 1 node") >= 1  # with mpirun -n 2
    assert "\n6\n" in ran
    assert "Nothing was left over." in ran
    assert "<html" in (home / "report.html").read_text()[:1000]
    assert not (home / ".hpcdask").exists() or not list((home / ".hpcdask").glob("*/keys"))


OTHERS = [block for block in SHELL if block.why is None and block.page != FIRST_PAGE]


def test_shell_of_other_pages(new_user):
    for block in OTHERS:
        _run(block, *new_user)


def _run(block: Block, home: Path, env: dict[str, str]) -> str:
    """Run a block as it stands; return what it said."""
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", block.text],
        cwd=home,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
    )
    # the doctor may find something that could be better
    fine = (0, 1) if shlex.split(block.text)[:2] == ["hpcdask", "doctor"] else (0,)
    assert done.returncode in fine, f"{block}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr
