"""Dask's configuration of hpcdask and of jobs: what is in force, from where, and what is amiss."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import functools
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask.config
from dask.utils import parse_bytes

from hpcdask.comm.fabric import interfaces
from hpcdask.errors import HpcdaskError, UsageError
from hpcdask.jobs.folder import base_path
from hpcdask.jobs.owner import check_owned
from hpcdask.node.scratch import base_folder
from hpcdask.queues.environment import job_id
from hpcdask.queues.registry import queue_class, systems
from hpcdask.security.credentials import check_configuration
from hpcdask.spec.records import Record
from hpcdask.upstream.configuration import sources, unreadable

from .findings import Finding, Reporter

if TYPE_CHECKING:
    from .nodes import Node

say = Reporter("configuration")
#: Sections that are read, with an example of each; what hpcdask itself reads.
SECTIONS = {
    "hpcdask": "hpcdask: {port-range: 20000-20999}",
    "jobqueue": "jobqueue: {slurm: {queue: gpu}}",
}
OWN_KEYS = ("port-range", "shared-directory")
#: Keys that name a folder, and whether that must be this user's own if it is there.
FOLDERS = {
    "shared-temp-directory": True,
    "log-directory": True,
    "local-directory": False,
    "shared-directory": False,
}
#: Characters of a value that are shown; how alike two names are of which one may be misspelt.
SHOWN, ALIKE = 100, 0.75
#: Keys of dask-jobqueue that take lists.
LISTS = ("job-script-prologue", "job-extra-directives", "worker-extra-args")
SCHEDULER_INTERFACE = "scheduler-options.interface"
#: Seconds for the command that lists a system's queues.
COMMAND_DEADLINE_S = 8.0


@dataclass(frozen=True)
class Setting(Record):
    """Value in one line, and the file or variable that it is from.

    The key is empty for a section that is misspelt, or has no keys. `obstacle` says why the folder
    that the value names cannot be used.
    """

    section: str
    key: str
    value: str
    source: str
    obstacle: str = ""


@dataclass(frozen=True)
class ConfigurationFacts(Record):
    """Settings in force, in the order of their sources, and what is there of what they name.

    `opened` is the error on a file that others may write.
    """

    settings: tuple[Setting, ...] = ()
    opened: str = ""
    unreadable: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    queues: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def read(cls) -> ConfigurationFacts:
        """Read all sources, and look at the folders, interfaces and queues that they name."""
        found: dict[tuple[str, str], Setting] = {}
        for source, content in sources():
            for section, key, value in _entries(content):
                text = "" if value is None else " ".join(str(value).split())
                shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
                obstacle = obstacle_of(key, str(value)) if key in FOLDERS and value else ""
                found.pop((section, key), None)
                found[section, key] = Setting(section, key, shown, source, obstacle)
        queues: dict[str, list[str]] = {}
        for one in found.values():
            # of a job with many nodes, all would ask
            system = system_of(one.section) if one.key == "queue" and one.value else None
            if system and system not in queues and job_id() is None:
                queues[system] = _queues(system)
        opened = ""
        try:
            check_configuration()
        except UsageError as error:
            opened = str(error)
        return cls(
            tuple(found.values()),
            opened,
            tuple(unreadable()),
            tuple(one.name for one in interfaces(every=True)),
            tuple(map(str, dask.config.paths)),
            queues,
        )


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


def obstacle_of(key: str, value: str) -> str:
    """Return why the folder of a value cannot be used; empty if it can, also if it can be made."""
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


def _queues(system: str) -> list[str]:
    """Return the names of a system's queues; none where it does not tell."""
    queue = queue_class(system)
    if queue.list_queues and shutil.which(queue.list_queues[0]):
        with contextlib.suppress(HpcdaskError):
            door = queue()
            door.timeout_s = COMMAND_DEADLINE_S
            return asyncio.run(door.answer(*door.list_queues)).split()
    return []


def check(known: ConfigurationFacts, node: Node) -> Iterator[Finding]:
    """Yield what is in force, and what of it has no effect or cannot be used."""
    if known.opened:
        what, _, advice = known.opened.partition(". ")
        yield say.error("files", what, advice)
    for path in known.unreadable:
        yield say.warning("files", f"{path} cannot be read by you", f"Its owner: chmod a+r {path}")
    if not known.settings:
        yield say.ok("files", f"nothing of hpcdask or jobqueue in {', '.join(known.paths)}")
    yield from (_no_section(one) for one in known.settings if not one.key)
    settings = [one for one in known.settings if one.key]
    groups: dict[tuple[str, str], list[str]] = {}
    for one in settings:
        groups.setdefault((one.section, one.source), []).append(f"{one.key}={one.value}")
    for (section, source), values in groups.items():
        yield say.ok(section, f"{', '.join(values)} ({source})")
    for section in dict.fromkeys(one.section for one in settings):
        name = section.removeprefix("jobqueue.")
        near = difflib.get_close_matches(name, systems(), 1, ALIKE)
        if section != "hpcdask" and system_of(section) is None and near:
            value = f"is no queueing system's, and read only with config_name={name!r}"
            yield say.warning(section, value, f"Did you mean jobqueue.{near[0]}?")
    in_job = bool(node.facts.queue and node.facts.queue.job)
    for one in settings:
        for found in [*_check_key(one), *_check_value(one), *_check_there(one, known, in_job)]:
            yield replace(found, value=f"{one.key}: {found.value} ({one.source})")


def _no_section(one: Setting) -> Finding:
    if not one.value:
        value = f"no such section, so without effect ({one.source})"
        return say.warning(one.section, value, _meant(one.section, SECTIONS))
    value = f"is {one.value}, not a section with keys ({one.source})"
    example = SECTIONS[one.section.partition(".")[0]]
    return say.warning(one.section, value, f"Write it as in {example}")


def _check_key(one: Setting) -> Iterator[Finding]:
    key = one.key.partition(".")[0]
    known = OWN_KEYS if one.section == "hpcdask" else _keys(system_of(one.section))
    if key not in known:
        yield say.warning(one.section, "no such key, so without effect", _meant(key, known))


def _check_value(one: Setting) -> Iterator[Finding]:
    key, value, wrong, example = one.key, one.value, "", ""
    if not value:
        return
    if key in ("cores", "processes") and not value.isdecimal():
        wrong, example = f"{value!r} is not a whole number", "16"
    elif key == "walltime" and value.isdecimal():
        wrong, example = f"{value} is a number", "'10:00:00', in quotes"
    elif key == "memory":
        try:
            parse_bytes(value)
        except ValueError:
            wrong, example = f"{value!r} is no amount of memory", "64GiB"
    elif key in LISTS and not value.startswith("["):
        wrong, example = "is a text, not a list of lines", f"['{value}']"
    if wrong:
        yield say.warning(one.section, wrong, f"Write it as in {key}: {example}")


def _meant(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"Did you mean {near[0]}?" if near else f"There are {', '.join(sorted(known))}"


@functools.cache
def _keys(system: str | None) -> Collection[str]:
    """Return the keys of a system's section, or of any: those with defaults in dask-jobqueue."""
    spec = importlib.util.find_spec("dask_jobqueue")  # its import writes a file
    assert spec is not None
    assert spec.origin is not None
    defaults = os.path.join(os.path.dirname(spec.origin), "jobqueue.yaml")
    ((_, content),) = dask.config.collect_yaml([defaults], return_paths=True)
    sections = content["jobqueue"]
    return set().union(*([sections[system]] if system in sections else sections.values()))


def _check_there(one: Setting, known: ConfigurationFacts, in_job: bool) -> Iterator[Finding]:
    """Yield folders that cannot be used, and queues and interfaces that there are not."""
    if one.obstacle:
        what, _, advice = one.obstacle.partition(": ")
        if one.key == "local-directory" and not in_job:
            advice = "It is a folder of the nodes: see srun hpcdask doctor there"
            yield say.note(one.section, what, advice)
        else:
            mend = f"To fix it: {advice}" if advice else "Name a folder in which you may write"
            yield say.warning(one.section, what, mend)
    queues = known.queues.get(system_of(one.section) or "")
    if one.key == "queue" and queues:
        for name in set(filter(None, map(str.strip, one.value.split(",")))) - {*queues}:
            value = f"the queueing system has no {name}"
            yield say.warning(one.section, value, _meant(name, queues))
    # the interface of workers is the scheduler's, too, unless that has one of its own
    apart = any((it.section, it.key) == (one.section, SCHEDULER_INTERFACE) for it in known.settings)
    used = one.key == "interface" and (in_job or not apart)
    used |= one.key == SCHEDULER_INTERFACE and not in_job
    if used and one.value and known.interfaces and one.value not in known.interfaces:
        value = f"this machine has no interface {one.value}"
        yield say.warning(one.section, value, _meant(one.value, known.interfaces))
