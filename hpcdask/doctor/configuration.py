"""Dask's configuration of hpcdask and of jobs: settings in force, their sources, and mistakes."""

from __future__ import annotations

import difflib
import functools
import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
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

from .host import FolderFacts
from .report import Finding

finding = partial(Finding, "configuration")
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
        yield finding("files", "error", what, advice)
    for path in unreadable():
        advice = f"Its owner: chmod a+r {path}"
        yield finding("files", "warning", f"{path} cannot be read by you", advice)
    sections: dict[str, dict[str, Setting]] = {}
    for source, content in sources():
        for section, key, value in _entries(content):
            settings = sections.setdefault(section, {})
            settings.pop(key, None)  # in the order of their last sources
            settings[key] = Setting(value, source)
    if not sections:
        value = f"nothing of hpcdask or jobqueue in {', '.join(map(str, dask.config.paths))}"
        yield finding("files", "ok", value)
    for section, settings in sections.items():
        if one := settings.pop("", None):
            yield _no_section(section, one)
        if settings:
            yield from _check_section(section, settings)


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


def _no_section(section: str, one: Setting) -> Finding:
    if one.value is None:
        value = f"no such section, so without effect ({one.source})"
        return finding(section, "warning", value, _meant(section, SECTIONS))
    value = f"is {one}, not a section with keys ({one.source})"
    advice = f"Write it as in {SECTIONS[section.partition('.')[0]]}"
    return finding(section, "warning", value, advice)


def _check_section(section: str, settings: Mapping[str, Setting]) -> Iterator[Finding]:
    for source in dict.fromkeys(one.source for one in settings.values()):
        values = [f"{key}={one}" for key, one in settings.items() if one.source == source]
        yield finding(section, "ok", f"{', '.join(values)} ({source})")
    name = section.removeprefix("jobqueue.")
    system = next((one for one in systems() if name == one or name.startswith(f"{one}-")), None)
    near = difflib.get_close_matches(name, systems(), 1, ALIKE)
    if system is None and near:
        value = f"is no queueing system's, and read only with config_name={name!r}"
        yield finding(section, "warning", value, f"Did you mean jobqueue.{near[0]}?")
    known = OWN_KEYS if section == "hpcdask" else _keys(system)
    for key, one in settings.items():
        first = key.partition(".")[0]
        if first not in known:
            value = f"{key}: no such key, so without effect ({one.source})"
            yield finding(section, "warning", value, _meant(first, known))
    obstacles = list(_check_folders(section, settings))
    yield from obstacles
    if system and not obstacles and (refusal := _refusal(section, system)):
        files = dict.fromkeys(one.source for one in settings.values())
        yield finding(section, "warning", refusal, f"Correct it in {', '.join(files)}")


def _check_folders(section: str, settings: Mapping[str, Setting]) -> Iterator[Finding]:
    for key, (value, source) in settings.items():
        if key not in FOLDERS or not value:
            continue
        try:
            check_folder(key, str(value))
        except (OSError, UsageError) as error:
            what, _, mend = str(error).removeprefix("--local-directory: ").partition(": ")
            said = f"{key}: {what} ({source})"
            if key == "local-directory" and job_id() is None:
                advice = "It is a folder of the nodes: see srun hpcdask doctor there"
                yield finding(section, "note", said, advice)
            else:
                advice = f"To fix it: {mend or 'name a folder in which you may write'}"
                yield finding(section, "warning", said, advice)


def check_folder(key: str, value: str) -> None:
    """Raise UsageError or OSError if the folder of a key can neither be used nor made."""
    existing = path = Path(base_folder(value)) if key == "local-directory" else base_path(value)
    while not existing.exists():
        existing = existing.parent
    missing = "" if existing == path else f"{path} is missing"
    if missing and key == "shared-directory":
        raise UsageError(missing)
    if not FolderFacts.read(str(existing)).writable:
        raise UsageError(", and ".join(filter(None, (missing, f"{existing} cannot be written"))))
    if FOLDERS[key] and not missing:
        check_owned(path)


def _refusal(section: str, system: str) -> str:
    """Return the error of a cluster of this section about its values; empty if they are right."""
    from hpcdask.clusters.classes import class_of
    from hpcdask.clusters.options import ClusterOptions

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
    """Return the keys of a system's section, or of any, by dask-jobqueue's defaults."""
    spec = find_spec("dask_jobqueue")  # its import writes a file
    assert spec is not None
    assert spec.origin is not None
    defaults = os.path.join(os.path.dirname(spec.origin), "jobqueue.yaml")
    ((_, content),) = dask.config.collect_yaml([defaults], return_paths=True)
    sections = content["jobqueue"]
    return set().union(*([sections[system]] if system in sections else sections.values()))
