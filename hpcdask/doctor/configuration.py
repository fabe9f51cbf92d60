"""Dask's configuration of hpcdask and of jobs: settings in force, their sources, and mistakes."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import dask.config

from hpcdask.errors import UsageError
from hpcdask.jobs.folder import base_path, check_owned
from hpcdask.node.scratch import base_folder
from hpcdask.queues.environment import job_id
from hpcdask.queues.registry import systems
from hpcdask.security.credentials import check_configuration
from hpcdask.spec.records import Record
from hpcdask.upstream.configuration import sources, unreadable

from .findings import Finding, Reporter

say = Reporter("configuration")
#: Sections that are read, with an example of each, and the keys of hpcdask itself.
SECTIONS = {
    "hpcdask": "hpcdask: {port-range: 20000-20999}",
    "jobqueue": "jobqueue: {slurm: {queue: gpu}}",
}
OWN_KEYS = ("port-range", "shared-directory")
#: Keys that name a folder, and whether an existing one must be this user's own.
FOLDERS = {
    "shared-temp-directory": True,
    "log-directory": True,
    "local-directory": False,
    "shared-directory": False,
}
#: Characters of a value that are shown; similarity of a misspelt name.
SHOWN, ALIKE = 100, 0.75
#: Keywords that a site may leave to its users.
OF_USERS = {"cores": 1, "memory": "1GiB"}


class Setting(NamedTuple):
    """Value, and the file or variable that it is from."""

    value: Any
    source: str

    def __str__(self) -> str:
        text = "" if self.value is None else " ".join(str(self.value).split())
        return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


@dataclass(frozen=True)
class ConfigurationFacts(Record):
    """Findings on the configuration of a node, made there: its files are only there."""

    findings: tuple[Finding, ...]

    @classmethod
    def read(cls) -> ConfigurationFacts:
        """Read all sources, and look at the folders that they name."""
        return cls(tuple(_findings()))


def _findings() -> Iterator[Finding]:
    """Yield the settings in force, and those of them that have no effect or cannot be used."""
    try:
        check_configuration()
    except UsageError as error:
        what, _, advice = str(error).partition(". ")
        yield say.error("files", what, advice)
    for path in unreadable():
        yield say.warning("files", f"{path} cannot be read by you", f"Its owner: chmod a+r {path}")
    sections: dict[str, dict[str, Setting]] = {}
    for source, content in sources():
        for section, key, value in _entries(content):
            settings = sections.setdefault(section, {})
            settings.pop(key, None)  # in the order of their last sources
            settings[key] = Setting(value, source)
    if not sections:
        yield say.ok(
            "files", f"nothing of hpcdask or jobqueue in {', '.join(map(str, dask.config.paths))}"
        )
    for section, settings in sections.items():
        if one := settings.pop("", None):
            yield _no_section(section, one)
        if settings:
            yield from _check_section(section, settings)


def _no_section(section: str, one: Setting) -> Finding:
    if one.value is None:
        value = f"no such section, so without effect ({one.source})"
        return say.warning(section, value, _meant(section, SECTIONS))
    example = SECTIONS[section.partition(".")[0]]
    value = f"is {one}, not a section with keys ({one.source})"
    return say.warning(section, value, f"Write it as in {example}")


def _check_section(section: str, settings: Mapping[str, Setting]) -> Iterator[Finding]:
    files: dict[str, list[str]] = {}
    for key, one in settings.items():
        files.setdefault(one.source, []).append(f"{key}={one}")
    for source, values in files.items():
        yield say.ok(section, f"{', '.join(values)} ({source})")
    system, name = system_of(section), section.removeprefix("jobqueue.")
    near = difflib.get_close_matches(name, systems(), 1, ALIKE)
    if section != "hpcdask" and system is None and near:
        value = f"is no queueing system's, and read only with config_name={name!r}"
        yield say.warning(section, value, f"Did you mean jobqueue.{near[0]}?")
    known = OWN_KEYS if section == "hpcdask" else _keys(system)
    obstacles = False
    for key, one in settings.items():
        said = f"{key}: {{}} ({one.source})"
        first = key.partition(".")[0]
        if first not in known:
            value = said.format("no such key, so without effect")
            yield say.warning(section, value, _meant(first, known))
        obstacle = obstacle_of(key, str(one.value)) if key in FOLDERS and one.value else ""
        if not obstacle:
            continue
        obstacles = True
        what, _, advice = obstacle.partition(": ")
        if key == "local-directory" and job_id() is None:
            advice = "It is a folder of the nodes: see srun hpcdask doctor there"
            yield say.note(section, said.format(what), advice)
        else:
            mend = f"To fix it: {advice}" if advice else "Name a folder in which you may write"
            yield say.warning(section, said.format(what), mend)
    if system and not obstacles and (refusal := _refusal(section, system)):
        yield say.warning(section, refusal, f"Correct it in {', '.join(files)}")


def _entries(content: Any, *path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield section, key and value of all that concerns hpcdask and jobs, as Dask spells keys."""
    if isinstance(content, Mapping) and (content or not path):
        for name, value in content.items():
            known = str(name).replace("_", "-")
            if path or known in SECTIONS:
                yield from _entries(value, *path, known)
            elif difflib.get_close_matches(known, SECTIONS, 1, ALIKE):
                yield known, "", None
        return
    count = 2 if path[:1] == ("jobqueue",) else 1
    if len(path) > count or content not in (None, {}, ""):
        yield ".".join(path[:count]), ".".join(path[count:]), content


def _refusal(section: str, system: str) -> str:
    """Return the error of a cluster of this section about its values; empty if they are right."""
    from hpcdask.clusters.classes import class_of
    from hpcdask.clusters.options import ClusterOptions

    known = dask.config.get(section, {})
    keywords = {key: value for key, value in OF_USERS.items() if key not in known}
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


def obstacle_of(key: str, value: str) -> str:
    """Return why the folder of a value cannot be used; empty if it can, or can be made."""
    try:
        existing = path = Path(base_folder(value)) if key == "local-directory" else base_path(value)
        while not existing.exists():
            existing = existing.parent
        if key == "shared-directory" and existing != path:
            return f"{path} is missing"
        missing = f"{path} is missing, and " if existing != path else ""
        try:  # the kernel's word on access is always yes to root
            with tempfile.TemporaryFile(dir=existing):
                pass
        except OSError:
            return f"{missing}{existing} cannot be written"
        if FOLDERS[key] and existing == path:
            check_owned(path)
    except (OSError, UsageError) as error:
        return str(error).removeprefix("--local-directory: ")
    return ""


def system_of(section: str) -> str | None:
    """Return the queueing system of a section such as ``jobqueue.slurm-h200``, or None."""
    name = section.removeprefix("jobqueue.")
    return next((one for one in systems() if name == one or name.startswith(f"{one}-")), None)


def _meant(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"Did you mean {near[0]}?" if near else f"There are {', '.join(sorted(known))}"


@functools.cache
def _keys(system: str | None) -> Collection[str]:
    """Return the keys of a system's section, or of any, by dask-jobqueue's defaults."""
    spec = importlib.util.find_spec("dask_jobqueue")  # its import writes a file
    assert spec is not None
    assert spec.origin is not None
    defaults = os.path.join(os.path.dirname(spec.origin), "jobqueue.yaml")
    ((_, content),) = dask.config.collect_yaml([defaults], return_paths=True)
    sections = content["jobqueue"]
    return set().union(*([sections[system]] if system in sections else sections.values()))
