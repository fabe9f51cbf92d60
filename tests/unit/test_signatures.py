"""What editors, type checkers and help() know of keywords is what the run time takes."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

import hpcdask
from hpcdask.clusters import typed
from hpcdask.clusters.cluster import JobCluster
from hpcdask.clusters.configuration import import_job_class, import_jobqueue
from hpcdask.clusters.keywords import job_keywords
from hpcdask.queues.registry import SYSTEMS, queue_class
from hpcdask.runner.runner import Runner
from hpcdask.spec.keywords import InitializeKeywords, RunKeywords
from hpcdask.spec.signatures import Keyword, describe, type_text
from hpcdask.spec.specs import RunSpec, WorkerSpec
from launching import needs

ROOT = Path(hpcdask.__file__).parent.parent
USES = Path(__file__).with_name("uses.py")
OWN = dict(inspect.signature(JobCluster).parameters)
OWN.pop("job_keywords")
WORKER = {field.name for field in dataclasses.fields(WorkerSpec)}
RUN = {field.name for field in dataclasses.fields(RunSpec)}


def of_checkers(keywords: type) -> dict[str, str]:
    """The types that type checkers know, by the keywords' names."""
    return {name: type_text(one) for name, one in typing.get_type_hints(keywords).items()}


def of_run_time(name: str) -> dict[str, str]:
    parameters = inspect.signature(getattr(hpcdask, name)).parameters.values()
    return {one.name: type_text(one.annotation) for one in parameters}


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_cluster_s_signature_has_the_keywords_that_it_takes(system: str):
    name, queue = SYSTEMS[system].cluster, queue_class(system)
    taken = {*OWN, *WORKER, *job_keywords(import_job_class(queue.jobqueue))}
    taken |= {"gpu_request"} if system == "slurm" else set()
    known = of_run_time(name)
    assert set(known) == taken
    (checked,) = typing.get_args(typing.get_type_hints(getattr(typed, name).__init__)["keywords"])
    assert of_checkers(checked) | {"n_workers": "int"} == known
    assert [key for key, text in known.items() if text == "Any"] == ["loop"]
    told = re.findall(r"^    (\w+) : (?!Any)", getattr(hpcdask, name).__doc__, flags=re.M)
    assert sorted(told) == sorted(taken)


def test_the_signatures_of_a_runner_have_the_fields_of_its_spec():
    assert set(of_run_time("Runner")) == RUN
    dask_mpi = {"exit", "worker_options", "nanny", "worker_class", "comm", "dashboard"}
    assert set(of_run_time("initialize")) == RUN | dask_mpi
    checked = of_checkers(InitializeKeywords) | {"exit": "bool"}
    assert checked | {"worker_options": "dict[str, Any] | None"} == of_run_time("initialize")
    assert set(of_checkers(RunKeywords)) == RUN
    for field in dataclasses.fields(RunSpec):
        assert f"\n    {field.name} : " in Runner.__doc__
        default = inspect.signature(Runner).parameters[field.name].default
        assert default == field.default
        RunSpec.from_keywords({field.name: default})


@needs("dask_mpi")
def test_what_dask_mpi_takes_is_known():
    import dask_mpi

    assert set(inspect.signature(dask_mpi.initialize).parameters) <= set(of_run_time("initialize"))


#: What dask-jobqueue's documentation says of a type, and what a value may be.
WORDS = {"int": int, "str": str, "bool": bool, "float": float, "list": list, "dict": dict}
#: It says less than is taken, or is wrong about itself: a dict is for HTCondor alone.
OTHERWISE = {"nanny", "worker_command", "memory", "disk", "job_extra", "job_extra_directives"}


@pytest.mark.parametrize("system", sorted(set(SYSTEMS) - {"local"}))
def test_types_of_keywords_are_those_that_dask_jobqueue_documents(system: str):
    module, job = queue_class(system).jobqueue
    cluster = getattr(import_jobqueue(module), job.replace("Job", "Cluster"))
    told = dict(re.findall(r"^ +(\w+) ?: (\w+)(?: of str)?$", cluster.__doc__, flags=re.M))
    assert len(told) > 20
    parameters = inspect.signature(getattr(hpcdask, SYSTEMS[system].cluster)).parameters
    for name in set(told) & set(parameters) - set(OWN) - WORKER - OTHERWISE:
        takes = plain_types(parameters[name].annotation)
        assert takes == {WORDS[told[name]]}, name


def plain_types(annotation: Any) -> set[type]:
    """The types of a union but None, without what they hold."""
    parts = typing.get_args(annotation)
    return {typing.get_origin(part) or part for part in parts if part is not type(None)}


@pytest.mark.parametrize("indent", ["", "    "], ids=["of Python 3.13", "of the source"])
def test_keywords_take_the_place_of_theirs_in_a_docstring(indent: str):
    sections = ["Parameters", "----------", "**options", "    All.", "Raises", "------"]
    doc = "Do.\n\n" + "".join(f"{indent}{line}\n" for line in sections)
    told = inspect.cleandoc(describe(doc, [Keyword("size", int | None, "How much.")]))
    expected = ["Parameters", "----------", "size : int", "    How much.", "Raises", "------"]
    assert told.splitlines() == ["Do.", "", *expected]


LOOK = """
import sys
from hpcdask import SLURMCUDACluster
print("dask_jobqueue" in sys.modules)
assert "walltime" in SLURMCUDACluster.__doc__
print("dask_jobqueue" in sys.modules)
"""


def test_a_class_does_not_load_dask_jobqueue_before_somebody_looks():
    done = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "False\nTrue\n"


def test_a_class_of_the_user_has_a_signature_of_its_own():
    class Mine(hpcdask.SLURMCUDACluster):
        def __init__(self, size: int) -> None:
            super().__init__(cores=size, memory="4GiB")

    class Same(hpcdask.SLURMCUDACluster):
        pass

    assert list(inspect.signature(Mine).parameters) == ["size"]
    assert "gpu_request" in inspect.signature(Same).parameters


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("hpcdask.SLURMCUDACluster(wal", "walltime="),
        ("hpcdask.HTCondorCUDACluster(dis", "disk="),
        ("hpcdask.Runner(workers", "workers_min="),
        ("hpcdask.initialize(worker_cl", "worker_class="),
    ],
)
@needs("jedi")
def test_a_notebook_completes_keywords(text: str, found: str):
    import jedi

    live = jedi.Interpreter(text, [{"hpcdask": hpcdask}])
    assert found in [one.name for one in live.complete()]


@pytest.mark.slow
@needs("mypy")
def test_mypy_finds_wrong_uses_and_no_others():
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-color-output", str(USES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    said = re.findall(r"uses\.py:(\d+): error: (.*)", done.stdout)
    expected = [
        (str(number), line.partition("  # wrong: ")[2])
        for number, line in enumerate(USES.read_text().splitlines(), 1)
        if "  # wrong: " in line
    ]
    assert [number for number, _ in said] == [number for number, _ in expected], done.stdout
    for (number, message), (_, words) in zip(said, expected, strict=True):
        assert words in message, f"line {number}: {message}"
