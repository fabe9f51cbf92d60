"""What editors, type checkers and help() know of keywords is what the run time takes."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import hpcdask
from hpcdask.clusters.keywords import OWN, SPEC_FIELDS, job_keywords
from hpcdask.clusters.options import import_job_class
from hpcdask.queues.registry import SYSTEMS, queue_class
from hpcdask.runner.runner import Runner
from hpcdask.spec.keywords import InitializeKeywords, RunKeywords, type_text
from hpcdask.spec.specs import RunSpec
from launching import needs

ROOT = Path(hpcdask.__file__).parent.parent
USES = Path(__file__).with_name("uses.py")
RUN = {field.name for field in dataclasses.fields(RunSpec)}


def of_run_time(name: str) -> dict[str, str]:
    parameters = inspect.signature(getattr(hpcdask, name)).parameters.values()
    return {one.name: type_text(one.annotation) for one in parameters}


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_cluster_s_signature_has_the_keywords_that_it_takes(system: str):
    name, queue = SYSTEMS[system].cluster, queue_class(system)
    taken = {*OWN, *SPEC_FIELDS, *job_keywords(import_job_class(queue.jobqueue))}
    taken |= {"gpu_request"} if system == "slurm" else set()
    known = of_run_time(name)
    assert set(known) == taken
    cls = getattr(hpcdask, name)
    (checked,) = typing.get_args(typing.get_type_hints(cls.__init__)["keywords"])
    assert checked is cls.keywords
    assert [key for key, text in known.items() if text == "Any"] == ["loop"]
    told = re.findall(r"^    (\w+) : (?!Any)", cls.__doc__, flags=re.M)
    assert sorted(told) == sorted(taken - {"loop"})
    assert "    name : str\n        Name of the cluster." in cls.__doc__


def test_the_signatures_of_a_runner_have_the_fields_of_its_spec():
    assert set(of_run_time("Runner")) == RUN
    dask_mpi = {"exit", "worker_options", "nanny", "worker_class", "comm", "dashboard"}
    assert set(of_run_time("initialize")) == RUN | dask_mpi
    hints = typing.get_type_hints(InitializeKeywords).items()
    checked = {"exit": "bool", "worker_options": "dict[str, Any] | None"}
    assert checked | {key: type_text(one) for key, one in hints} == of_run_time("initialize")
    assert set(typing.get_type_hints(RunKeywords)) == RUN
    for field in dataclasses.fields(RunSpec):
        assert f"\n    {field.name} : " in Runner.__doc__
        default = inspect.signature(Runner).parameters[field.name].default
        assert default == field.default
        RunSpec.from_keywords({field.name: default})


@needs("dask_mpi")
def test_what_dask_mpi_takes_is_known():
    import dask_mpi

    assert set(inspect.signature(dask_mpi.initialize).parameters) <= set(of_run_time("initialize"))


def test_a_class_is_known_without_dask_jobqueue():
    look = "import sys, hpcdask; hpcdask.SLURMCUDACluster; sys.exit('dask_jobqueue' in sys.modules)"
    subprocess.run([sys.executable, "-c", look], timeout=300, check=True)


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
    command = [sys.executable, "-m", "mypy", "--no-color-output", str(USES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1), done.stderr
    said = dict(re.findall(r"uses\.py:(\d+): error: (.*)", done.stdout))
    lines = enumerate(USES.read_text().splitlines(), 1)
    wrong = {
        str(number): line.split("  # wrong: ")[1] for number, line in lines if "# wrong" in line
    }
    assert said.keys() == wrong.keys(), done.stdout
    assert not [number for number, words in wrong.items() if words not in said[number]], done.stdout
