"""What the doctor says of Dask's configuration of hpcdask and of jobs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import dask.config
import pytest

import hpcdask
from hpcdask.doctor import configuration


@pytest.fixture
def site(monkeypatch, tmp_path):
    """Write a file of configuration, and say what the doctor finds: topic, status and words."""

    def look(text: str, *, job: str = "", **environ: str) -> list[tuple[str, str, str]]:
        (tmp_path / "site.yaml").write_text(text)
        monkeypatch.setattr(dask.config, "paths", [str(tmp_path / "site.yaml")])
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        if job:
            monkeypatch.setenv("SLURM_JOB_ID", job)
        with dask.config.set(dask.config.collect(dask.config.paths)):
            found = configuration.examine()
        return [(one.topic, one.status, f"{one.value} -> {one.advice}") for one in found]

    return look


def bad(found: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    return [one for one in found if one[1] != "ok"]


def test_what_is_in_force_has_the_file_or_variable_that_it_is_from(site, tmp_path):
    found = site(
        "hpcdask:\n  port_range: 20000-20999\n"
        "jobqueue:\n  slurm:\n    queue: gpu\n    cores: 8\n    scheduler-options:\n"
        "      interface: lo\ndistributed:\n  comm:\n    retry: 1\n",
        DASK_JOBQUEUE__SLURM__QUEUE="debug",
    )
    file = tmp_path / "site.yaml"
    assert found == [
        ("hpcdask", "ok", f"port-range=20000-20999 ({file}) -> "),
        (
            "jobqueue.slurm",
            "ok",
            f"queue=gpu, cores=8, scheduler-options={{'interface': 'lo'}} ({file}) -> ",
        ),
        ("jobqueue.slurm", "ok", "queue=debug (variable DASK_JOBQUEUE__SLURM__QUEUE) -> "),
    ]


def test_a_configuration_without_a_word_names_where_dask_looked(site, tmp_path):
    ((topic, status, words),) = site("jobqueue:\n  slurm: null\n")
    assert (topic, status) == ("files", "ok")
    assert f"nothing of hpcdask or jobqueue in {tmp_path}/site.yaml" in words


@pytest.mark.parametrize(
    ("text", "topic", "words"),
    [
        ("hpcdask: {port-rnage: 1}", "hpcdask", r"port-rnage: no such key.*mean port-range\?"),
        ("jobqueue: {slurm: {cors: 4}}", "jobqueue.slurm", r"cors: .*Did you mean cores\?"),
        ("jobqueue: {slurm: {poll-intervl: 9}}", "jobqueue.slurm", r"Did you mean poll-interval\?"),
        ("jobqueue: {mine: {wall_time: a}}", "jobqueue.mine", r"Did you mean walltime\?"),
        ("jobqueue: {slrum: {queue: a}}", "jobqueue.slrum", r"Did you mean jobqueue\.slurm\?"),
        ("jobqueues: {slurm: {queue: a}}", "jobqueues", r"no such .*site.*Did you mean jobqueue\?"),
        ("hpcdsk: {port-range: 1}", "hpcdsk", r"no such section.*Did you mean hpcdask\?"),
        ("hpcdask: 3", "hpcdask", r"is 3, not a section .*site\.yaml.* as in hpcdask: {port-range"),
        ("jobqueue: {queue: gpu}", "jobqueue.queue", r"is gpu, not .* as in jobqueue: {slurm: {"),
        ("jobqueue: [slurm]", "jobqueue", r"is \['slurm'\], not a section"),
        ("jobqueue: {pbs: {cores: many}}", "jobqueue.pbs", r"cores: 'many' is not a.*site\.yaml"),
        ("jobqueue: {pbs: {walltime: 10:00:00}}", "jobqueue.pbs", r"walltime=36000 .* in quotes"),
        ("jobqueue: {pbs: {memory: 2Gigs}}", "jobqueue.pbs", r"memory: '2Gigs' is not an amount"),
        ("jobqueue: {pbs: {job-script-prologue: a}}", "jobqueue.pbs", r"a text: .*\['a'\]"),
    ],
)
def test_what_is_misspelt_is_a_warning(site, text, topic, words):
    ((found, status, said),) = bad(site(text))
    assert (found, status) == (topic, "warning")
    assert re.search(words, said), said


@pytest.mark.parametrize("section", ["slurm", "mine"])
def test_keywords_of_the_classes_are_keys_too(site, section):
    """Regression: the doctor wanted documented keys such as poll-interval to be removed."""
    keys = "{poll-interval: 30s, start_timeout: 600, gpu-request: gres, device-memory-limit: 0.8}"
    assert not bad(site(f"jobqueue: {{{section}: {keys}}}"))


def test_a_file_that_may_not_be_read_is_named(site, tmp_path, monkeypatch):
    """Dask leaves it out in silence. The kernel's word on access, which is yes to root, is made."""
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != f"{tmp_path}/site.yaml")
    ((topic, status, words),) = bad(site("jobqueue: {slurm: {queue: gpu}}"))
    assert (topic, status) == ("files", "warning")
    assert f"{tmp_path}/site.yaml cannot be read by you -> Its owner: chmod a+r" in words


def test_every_key_of_its_own_is_known():
    """As the sources read them."""
    package = Path(hpcdask.__file__).parent
    read = re.compile(r'dask\.config\.get\(\s*"hpcdask\.([a-z-]+)"')
    found = [key for path in package.rglob("*.py") for key in read.findall(path.read_text())]
    assert set(found) == set(configuration.OWN_KEYS)


@pytest.mark.parametrize(
    ("keys", "job", "unknown"),
    [
        ("interface: lo", "", False),
        ("interface: ib77", "", True),
        ("interface: ib77", "7", True),
        ("interface: ib77, scheduler-options: {interface: lo}", "", False),
        ("interface: lo, scheduler-options: {interface: ib77}", "7", False),
    ],
)
def test_an_interface_that_there_is_not(site, keys, job, unknown):
    found = bad(site(f"jobqueue: {{pbs: {{queue: a}}, slurm: {{{keys}}}}}", job=job))
    assert [one[:2] for one in found] == [("jobqueue.slurm", "warning")] * unknown
    assert not unknown or "this machine has no interface ib77" in found[0][2]


def test_a_file_that_others_may_write_is_an_error(site, tmp_path):
    file = tmp_path / "site.yaml"
    file.touch()
    file.chmod(0o666)
    ((topic, status, words),) = bad(site("hpcdask: {}"))
    assert (topic, status) == ("files", "error")
    assert f"others may write {file}" in words
    assert f"chmod go-w {file}" in words
