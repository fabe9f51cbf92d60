"""What the documentation says is there: options, keywords, messages, links."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import dask.config
import pytest
import yaml

import hpcdask
from hpcdask import cli
from hpcdask.bench.command import bench
from hpcdask.clusters.keywords import job_keywords
from hpcdask.clusters.options import import_jobqueue
from hpcdask.runner.options import command, parse
from hpcdask.spec.specs import RunSpec
from hpcdask.workloads import genotypes, packing, svd
from hpcdask.workloads import zarr as stores
from launching import needs, unavailable

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
RUNNER = command()
BLOCK = re.compile(r"^```([a-z{}-]+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

#: Options of other programs that pages name, by program.
FOREIGN = {
    "apptainer": "--bind --build-arg --cleanenv --nv --sandbox",
    "docker": "--gpus --ipc --network --pid",
    "ldd": "--version",
    "mpirun": "--allow-run-as-root --map-by --oversubscribe --stdin",
    "pip": "--find-links --no-compile --no-index",
    "python -m venv": "--system-site-packages",
    "pre-commit": "--all-files",
    "pytest": "--durations --timeout",
    "benchmarks/peers.py": "--budget --cases --virtual-slurm --write-docs",
    "benchmarks/programs/rechunk.py": "--method",
    "benchmarks/programs/scatter.py": "--what",
    "slurm": "--account --chdir --comment --container-image --container-mount-home --cpus-per-task "
    "--exclude --exclusive --export --gpu-bind --gpus --gpus-per-node --gpus-per-task "
    "--gres --het-group --jobid --me --mem --mem-per-gpu --mpi --nodes --ntasks --ntasks-per-node "
    "--overlap --partition --pty --requeue --signal --test-only --time",
}
FOREIGN_OPTIONS = {option for options in FOREIGN.values() for option in options.split()}


def options_of(one: click.Command) -> set[str]:
    """All options of a command, and of the commands in it."""
    found = {o for p in one.params for o in [*p.opts, *p.secondary_opts] if o.startswith("-")}
    for name in getattr(one, "commands", {}):
        found |= options_of(one.commands[name])
    return found | {"--help", "--help-all", "-h"}


OWN_OPTIONS = options_of(RUNNER) | options_of(cli.main) | options_of(bench)


def prose(text: str) -> str:
    """A page without its blocks and comments."""
    return re.sub(r"<!--.*?-->", "", BLOCK.sub("", text), flags=re.DOTALL)


def spans(text: str) -> list[str]:
    """What stands in backquotes between the lines."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text))]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each call of hpcdask in a shell's text, without what launches it."""
    text = re.sub(r"<<'?(\w+)'?\n.*?\n\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a word of prose with an apostrophe
            continue
        while words:
            end = next((i for i, word in enumerate(words) if set(word) <= set(";&|<>")), len(words))
            yield from _called(words[:end])
            words = words[end + 1 :]


def _called(words: list[str]) -> Iterator[list[str]]:
    for i, word in enumerate(words):
        if word == "-m" and words[i + 1 : i + 2] in (["hpcdask.run"], ["hpcdask.bench"]):
            yield words[i + 1 :]
            return
        # an image or a package may have that name too
        if Path(word).name == "hpcdask" and words[0] not in ("docker", "pip"):
            yield ["hpcdask", *words[i + 1 :]]
            return


def check(words: list[str]) -> None:
    """Raise if a call of hpcdask has options that do not exist."""
    name, *given = (word for word in words if not re.fullmatch(r"\[.*\]|\.\.\.|…|\$.*", word))
    if {"--help", "--help-all", "-h"} & set(given):
        return
    if name == "hpcdask.run":
        launched = parse(given)
        if launched.program and launched.program.target == "hpcdask.bench":
            _check(bench, launched.program.arguments)
    else:
        _check(bench if name == "hpcdask.bench" else cli.main, given)


def _check(one: click.Command, words: list[str]) -> None:
    if isinstance(one, click.Group):
        if not words or words[0].isupper():  # all of them, or a placeholder
            return
        if words[0].startswith("-"):
            assert words[0] in options_of(one), words
        elif words[0] in ("run", "bench"):
            check([f"hpcdask.{words[0]}", *words[1:]])
        else:
            _check(one.commands[words[0]], words[1:])
    elif options := one.make_context(one.name, list(words)).params.get("run"):
        parse(shlex.split(options))


@pytest.mark.parametrize("page", PAGES)
def test_options_exist(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = PAGES[page]
    shells = [block for language, block in BLOCK.findall(text) if language in ("bash", "sh")]
    for shell in shells:
        for words in commands(shell):
            check(words)
    peers = _dask_mpi_options() if page == "docs/launching.md" else set()
    known = OWN_OPTIONS | FOREIGN_OPTIONS | peers
    for span in spans(text):
        if re.match(r"(hpcdask|srun|mpirun|python) ", span):
            for words in commands(span):
                if words[0] == "hpcdask" or len(words) > 1:
                    check(words)
        for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", span):
            assert option in known, f"{page}: {span}"
        assert "--[no-]" not in span, f"{page}: write both forms, {span}"


# Keywords

FUNCTIONS = [
    hpcdask.connect,
    hpcdask.gang,
    hpcdask.initialize,
    svd.svd_rows,
    packing.pack_array,
    stores.open_rows,
    genotypes.population_structure,
]


#: Assignments in backquotes that are no keywords of hpcdask: of Prefect, NumPy, Dask, joblib, PBS,
#: dask-mpi, and groups of the pages' clusters.
PLAIN = {"cluster", "cluster_class", "out", "pure", "scatter", "ngpus", "comm", "gpu", "cpu"}


@cache
def keywords() -> dict[str, set[str]]:
    """Return the keywords of each public name, and of what clusters do."""
    clusters = [getattr(hpcdask, name) for name in hpcdask.__all__ if name.endswith("Cluster")]
    methods = ("scale", "adapt", "job_logs", "logs", "close")
    run = set(RunSpec.__dataclass_fields__)
    of_cluster = run | {"gpu", "cpu"}
    for cls in clusters:
        for one in (cls, *(getattr(cls, method) for method in methods)):
            of_cluster |= set(inspect.signature(one).parameters)
    found = {one.__name__: set(inspect.signature(one).parameters) for one in FUNCTIONS}
    found |= dict.fromkeys(("Runner", "initialize"), run | {"exit", "worker_options"})
    names = [cls.__name__ for cls in clusters]
    return found | dict.fromkeys((*methods[:-1], *names, "SLURMCluster"), of_cluster)


def calls(source: str) -> Iterator[tuple[str, set[str]]]:
    """Yield name and keywords of each call in a program."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            yield name, {word.arg for word in node.keywords if word.arg}


@pytest.mark.parametrize("page", PAGES)
def test_keywords_exist(page):
    text = PAGES[page]
    sources = [block for language, block in BLOCK.findall(text) if language == "python"]
    for span in spans(text):
        with contextlib.suppress(SyntaxError, ValueError):
            ast.parse(source := span.replace("…", "0").replace("(...)", "()"))
            sources.append(source)
    for name, given in (call for source in sources for call in calls(source)):
        assert given <= keywords().get(name, given), f"{page}: {name}"
    for span in spans(text):
        if found := re.match(r"([a-z][a-z_]*)=(?!=)", span):
            assert found[1] in set.union(PLAIN, *keywords().values()), f"{page}: {span}"


# Coming from other tools


def _dask_mpi_options() -> set[str]:
    try:
        from dask_mpi.cli import main
    except ModuleNotFoundError:
        unavailable("dask-mpi is not installed")

    return options_of(main)


def _rows(heading: str) -> list[list[str]]:
    """The table under the last header row that begins with this cell."""
    lines = PAGES["docs/launching.md"].splitlines()
    start = max(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def told(heading: str, pattern: str) -> set[str]:
    """Return what the first column of a table names."""
    return {found for row in _rows(heading) for found in re.findall(pattern, row[0])}


def test_all_options_of_dask_mpi_are_told():
    assert told("dask-mpi", r"--[a-z-]+") == _dask_mpi_options() - {"--help", "--help-all", "-h"}


@needs("dask_cuda")
def test_all_keywords_of_dask_cuda_are_told():
    from dask_cuda import LocalCUDACluster

    there = set(inspect.signature(LocalCUDACluster.__init__).parameters)
    assert told("`LocalCUDACluster`", r"`(\w+)`") == there - {"self", "kwargs"}


def test_dask_jobqueue_has_what_is_told():
    slurm = import_jobqueue("slurm")
    there = job_keywords(slurm.SLURMJob)
    there |= set(inspect.signature(import_jobqueue("core").JobQueueCluster.__init__).parameters)
    assert told("dask-jobqueue", r"`(\w+)=") <= there


# Messages


@cache
def texts() -> set[str]:
    """Return the fixed parts of every text of the code; shorter ones are in every message."""
    nodes = (
        node
        for path in (ROOT / "hpcdask").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return {node.value for node in nodes if 8 <= len(node.value) < 1000}


def quotes() -> list[str]:
    """Return the messages that troubleshooting.md is about."""
    found = BLOCK.findall(PAGES["docs/troubleshooting.md"])
    return [text.removeprefix("warning: ") for language, text in found if language == "text"]


@pytest.mark.parametrize("quote", quotes(), ids=lambda quote: quote[:30])
def test_messages_exist(quote):
    """Most of a message is text of the code, and the rest are names and numbers."""
    assert sum(len(text) for text in texts() if text in quote) >= 0.4 * len(quote)


# Links


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page):
    """Those of the site are followed as it is built."""
    text = BLOCK.sub("", (ROOT / page).read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            assert (ROOT / target.partition("#")[0]).exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md"])
def test_paths_exist(page):
    """Programs that are named by their folder, as a reader looks for them."""
    text = (ROOT / page).read_text()
    named = [
        word for span in spans(text) for word in span.split() if re.search(r"\w/\w.*\.py$", word)
    ]
    assert len(named) > 5
    for name in named:
        found = [top for top in (ROOT, ROOT / "hpcdask", ROOT / "tests") if (top / name).exists()]
        assert found or "NAME" in name, f"{page}: {name}"


def test_the_citation_has_the_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(cited["version"]) == hpcdask.__version__


# The site guide

#: The file for all keys, and those of three kinds of site.
SITE, *KINDS = [
    text
    for page in ("docs/site-guide.md",)
    for language, text in BLOCK.findall(PAGES[page])
    if language == "yaml"
]


JOBQUEUE = Path(inspect.getfile(import_jobqueue("core"))).with_name("jobqueue.yaml")


@contextlib.contextmanager
def configured(text: str, folder: Path) -> Iterator[dict]:
    """Have dask read a file as an administrator writes it; its keys are those that there are."""
    (folder / "site.yaml").write_text(text)
    (found,) = dask.config.collect_yaml([str(folder / "site.yaml")])
    for system, section in found["jobqueue"].items():
        import_jobqueue(system)
        assert set(section) <= set(yaml.safe_load(JOBQUEUE.read_text())["jobqueue"][system])
    with dask.config.set(dask.config.merge(dask.config.config, found)):
        yield found


def script_of(cluster_class: type, **keywords) -> str:
    with cluster_class(**keywords) as cluster:
        return cluster.job_script()


def test_the_site_file_is_read(tmp_path):
    """With the networks of this machine."""
    text = re.sub("eth1|ib0", "lo", SITE).replace(": /local", f": {tmp_path}")
    with configured(text, tmp_path):
        assert dask.config.get("hpcdask.shared-directory") == "/scratch/rendezvous"
        script = script_of(hpcdask.SLURMCUDACluster)
        other = script_of(hpcdask.SLURMCUDACluster, queue="h200", gpu_type="h200")
    for line in ("-p gpu", "--cpus-per-task=16", "-t 02:00:00", "--gres=gpu:1"):
        assert f"#SBATCH {line}\n" in script
    assert "\nmodule load hpcdask/0.1\n" in script
    assert "--interface lo --" in f"{script} --"
    assert "#SBATCH -p h200\n" in other
    assert "#SBATCH --gres=gpu:h200:1\n" in other


#: Directives that each of them gives a job.
DIRECTIVES = {
    "slingshot": "-A abc_g, -C gpu, -q regular, --gpus-per-node=4, --gpu-bind=none",
    "infiniband": "-A abc, -p booster, --gres=gpu:4, --cpus-per-task=48",
    "pbs": "-A abc, -q main, -l select=1:ncpus=64:ngpus=4:mem=400GB",
}


@pytest.mark.parametrize("kind", DIRECTIVES)
def test_the_file_of_each_kind_of_site_gives_jobs_of_one_node(tmp_path, kind):
    text = dict(zip(DIRECTIVES, KINDS, strict=True))[kind]
    with configured(re.sub("interface: .*", "interface: lo", text), tmp_path) as found:
        (system,) = found["jobqueue"]
        script = script_of(getattr(hpcdask, f"{system.upper()}CUDACluster"))
    prefix = {"slurm": "#SBATCH", "pbs": "#PBS"}[system]
    for directive in DIRECTIVES[kind].split(", "):
        assert f"\n{prefix} {directive}\n" in script
    assert len(re.findall("^#.*(?:gpus-per-node|gres|ngpus)=", script, re.MULTILINE)) == 1
    assert "\nmodule load " in script
    assert " --workers 4 " in script


# The site


@needs("sphinx")
def test_the_site_builds_without_warnings_and_has_every_command_option_and_name(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"),
            *("-d", str(tmp_path / "doctrees"), str(ROOT / "docs"), str(tmp_path / "site")),
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    cli_page, api = (
        (tmp_path / f"site/reference/{name}.html").read_text() for name in ("cli", "api")
    )
    shown = re.sub(r"<[^>]+>", "", cli_page)
    for option in OWN_OPTIONS - {"-h", "--help", "--help-all", "-V", "--version", "--attached"}:
        assert option in shown, option
    for name in cli.main.commands:
        assert f"hpcdask {name}" in shown, name
    for name in bench.commands:
        assert f"\n| `{name}` | " in PAGES["docs/workloads.md"], name
    for name in hpcdask.__all__:
        assert f'id="hpcdask.{name}"' in api
