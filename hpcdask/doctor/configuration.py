"""Dask's configuration of hpcdask and of jobs: settings, their sources, and mistakes."""

from __future__ import annotations

import difflib
import functools
import warnings
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from importlib.metadata import distribution
from typing import Any

import dask.config

from hpcdask.errors import UsageError
from hpcdask.queues.registry import job_id, systems
from hpcdask.security.credentials import check_configuration
from hpcdask.upstream.configuration import sources, unreadable

from .report import Finding

finding = partial(Finding, "configuration")
#: Sections that are read, with an example of each, and the keys of hpcdask itself.
SECTIONS = {
    "hpcdask": "hpcdask: {port-range: 20000-20999}",
    "jobqueue": "jobqueue: {slurm: {queue: gpu}}",
}
OWN_KEYS = ("port-range", "shared-directory")
#: Characters of a value that are shown; similarity of a misspelt name.
SHOWN, ALIKE = 100, 0.75
#: Keywords that a site may leave to its users.
OF_USERS = {"cores": 1, "memory": "1GiB"}


def examine() -> tuple[Finding, ...]:
    """Return findings on this node's configuration, made here: its files are only here."""
    return tuple(_findings())


def _findings() -> Iterator[Finding]:
    """Yield the settings of all sources, weakest first, and those that cannot be used."""
    try:
        check_configuration()
    except UsageError as error:
        what, _, advice = str(error).partition(". ")
        yield finding("files", "error", what, advice)
    for path in unreadable():
        advice = f"Its owner: chmod a+r {path}"
        yield finding("files", "warning", f"{path} cannot be read by you", advice)
    found = [(*one, source) for source, content in sources() for one in _sections(content)]
    if not found:
        value = f"nothing of hpcdask or jobqueue in {', '.join(map(str, dask.config.paths))}"
        yield finding("files", "ok", value)
    files: dict[str, list[str]] = {}
    for section, content, source in found:
        example = SECTIONS.get(section.partition(".")[0])
        if example is None:
            value = f"no such section, so without effect ({source})"
            yield finding(section, "warning", value, _meant(section, SECTIONS))
        elif not isinstance(content, Mapping):
            value = f"is {content}, not a section with keys ({source})"
            yield finding(section, "warning", value, f"Write it as in {example}")
        else:
            files.setdefault(section, []).append(source)
            yield from _check_names(section, content, source)
    for section, there in files.items():
        if refusal := _refusal(section):
            yield finding(section, "warning", refusal, f"Correct it in {', '.join(there)}")


def _sections(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and contents of the sections, as Dask spells them, that are or look like ours."""
    for name, section in _canonical(content).items():
        if name == "jobqueue" and isinstance(section, Mapping):
            systems_ = _canonical(section).items()
            yield from ((f"{name}.{system}", keys) for system, keys in systems_ if keys)
        elif section and difflib.get_close_matches(name, SECTIONS, 1, ALIKE):
            yield name, section


def _canonical(content: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name).replace("_", "-"): value for name, value in content.items()}


def _system_of(section: str) -> str | None:
    """Return the queueing system of a section such as ``jobqueue.slurm-h200``, or None."""
    name = section.removeprefix("jobqueue.")
    return next((one for one in systems() if name == one or name.startswith(f"{one}-")), None)


def _check_names(section: str, content: Mapping[str, Any], source: str) -> Iterator[Finding]:
    """Yield the settings of one source, and findings on names that nothing reads."""
    settings = _canonical(content)
    texts = {key: " ".join(str(setting).split())[:SHOWN] for key, setting in settings.items()}
    value = ", ".join(f"{key}={text}" for key, text in texts.items())
    yield finding(section, "ok", f"{value} ({source})")
    name, system = section.removeprefix("jobqueue."), _system_of(section)
    near = difflib.get_close_matches(name, systems(), 1, ALIKE)
    if system is None and near:
        value = f"is no queueing system's, and read only with config_name={name!r}"
        yield finding(section, "warning", value, f"Did you mean jobqueue.{near[0]}?")
    known = OWN_KEYS if section == "hpcdask" else _keys(system)
    for key in filter(lambda one: one not in known, settings):
        value = f"{key}: no such key, so without effect ({source})"
        yield finding(section, "warning", value, _meant(key, known))


def _refusal(section: str) -> str:
    """Return the error of a cluster of this section about its values; empty if they are right."""
    from hpcdask.clusters.classes import class_of
    from hpcdask.clusters.options import ClusterOptions

    if (system := _system_of(section)) is None:
        return ""
    known = dask.config.get(section, {})
    keywords = {key: value for key, value in OF_USERS.items() if known.get(key) is None}
    keywords["config_name"] = section.removeprefix("jobqueue.")
    # a scheduler's interface is not of the nodes, those of workers are
    on_node = job_id() is not None and bool((known.get("scheduler-options") or {}).get("interface"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # dask-jobqueue's, on keywords that are left out
            ClusterOptions.read(class_of(system), keywords, on_node=on_node)
    except Exception as error:  # dask-jobqueue raises ValueError
        return " ".join(str(error).split())
    return ""


def _meant(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"Did you mean {near[0]}?" if near else f"There are {', '.join(sorted(known))}"


@functools.cache
def _keys(system: str | None) -> Collection[str]:
    """Return the keys of a system's section, or of any: dask-jobqueue's and the class's."""
    from hpcdask.clusters.classes import class_of
    from hpcdask.clusters.keywords import HereKeywords, types_of

    owners = map(class_of, systems() if system is None else [system])
    keywords = {name for owner in owners for name in types_of(owner.keywords)}
    keywords -= {"n_workers", *HereKeywords.__annotations__}
    # the import of dask-jobqueue's configuration writes a file
    defaults = distribution("dask-jobqueue").locate_file("dask_jobqueue/jobqueue.yaml")
    (content,) = dask.config.collect_yaml([str(defaults)])
    sections = content["jobqueue"]
    known = [sections[system]] if system in sections else sections.values()
    return {name.replace("_", "-") for name in keywords.union(*known)}
