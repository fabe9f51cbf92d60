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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from hpcdask.upstream.configuration import sources, unreadable

from .findings import Facts, Finding, Reporter

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


def read() -> Facts:
    """The values by section, in the order of their sources, and what is there of what they name."""
    values: dict[tuple[str, str], Facts] = {}
    for source, content in sources():
        for section, key, value in _entries(content):
            values.pop((section, key), None)
            values[section, key] = {"value": _text(value), "source": source}
            if key in FOLDERS and value:
                values[section, key]["obstacle"] = _obstacle(key, str(value))
    rows = [{"section": section, "key": key, **rest} for (section, key), rest in values.items()]
    asked = {system_of(row["section"]) for row in rows if row["key"] == "queue" and row["value"]}
    opened = ""
    try:
        check_configuration()
    except UsageError as error:
        opened = str(error)
    return {
        "values": rows,
        "open": opened,
        "unreadable": unreadable(),
        "interfaces": [one.name for one in interfaces(every=True)],
        "paths": list(map(str, dask.config.paths)),
        # of a job with many nodes, all would ask
        "queues": {one: _queues(one) for one in asked if one and job_id() is None},
    }


def _entries(content: Any, *path: str) -> Iterator[tuple[str, str, Any]]:
    """Section, key and value of all that concerns hpcdask and jobs; keys as Dask spells them.

    The key is empty for a section that is misspelt, or has no keys.
    """
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


def _text(value: Any) -> str:
    """A value in one line; empty for none."""
    text = "" if value is None else " ".join(str(value).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _obstacle(key: str, value: str) -> str:
    """Why the folder that a value names cannot be used; empty if it can, also if it can be made."""
    try:
        path = Path(base_folder(value)) if key == "local-directory" else base_path(value)
        existing = path
        while not existing.exists():
            existing = existing.parent
        if key == "shared-directory" and existing != path:
            return f"{path} is missing"
        if not _writable(existing):
            missing = f"{path} is missing, and " if existing != path else ""
            return f"{missing}{existing} cannot be written"
        if FOLDERS[key] and existing == path:
            check_owned(path)
    except (OSError, UsageError) as error:
        return str(error).removeprefix("--local-directory: ")
    return ""


def _writable(folder: Path) -> bool:
    """Return whether a file can be made in a folder: the kernel's answer is always yes to root."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def system_of(section: str) -> str | None:
    """The queueing system of a section such as ``jobqueue.slurm-h200``, if its name tells."""
    name = section.removeprefix("jobqueue.")
    return next((one for one in systems() if name == one or name.startswith(f"{one}-")), None)


def _queues(system: str) -> list[str] | None:
    """The names of a system's queues; None where it does not tell."""
    queue = queue_class(system)
    if not queue.list_queues or not shutil.which(queue.list_queues[0]):
        return None
    with contextlib.suppress(HpcdaskError):
        door = queue()
        door.timeout_s = COMMAND_DEADLINE_S
        return asyncio.run(door.answer(*door.list_queues)).split()
    return None


def check(facts: Facts) -> Iterator[Finding]:
    """Yield what is in force, and what of it has no effect or cannot be used."""
    known, every = facts["configuration"], facts["configuration"]["values"]
    if known["open"]:
        what, _, advice = known["open"].partition(". ")
        yield say.error("files", what, advice)
    for path in known.get("unreadable", ()):
        yield say.warning("files", f"{path} cannot be read by you", f"Its owner: chmod a+r {path}")
    if not every:
        yield say.ok("files", f"nothing of hpcdask or jobqueue in {', '.join(known['paths'])}")
    yield from (_no_section(row) for row in every if not row["key"])
    rows = [row for row in every if row["key"]]
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        shown = f"{row['key']}={row['value']}"
        groups.setdefault((row["section"], row["source"]), []).append(shown)
    for (section, source), values in groups.items():
        yield say.ok(section, f"{', '.join(values)} ({source})")
    for section in dict.fromkeys(row["section"] for row in rows):
        yield from _check_section(section)
    in_job = bool(facts.get("queue", {}).get("job"))
    for row in rows:
        system = system_of(row["section"])
        found = [*_check_key(row, system), *_check_value(row), *_check_folder(row, in_job)]
        found += _check_queue(row, known["queues"].get(system) or ())
        if in_job or row["key"] != "interface" or not _own_interface(row["section"], rows):
            found += _check_interface(row, known.get("interfaces", ()), in_job)
        for one in found:
            yield replace(one, value=f"{row['key']}: {one.value} ({row['source']})")


def _no_section(row: Facts) -> Finding:
    section, source = row["section"], row["source"]
    if not row["value"]:
        near = _meant(section, SECTIONS)
        return say.warning(section, f"no such section, so without effect ({source})", near)
    value = f"is {row['value']}, not a section with keys ({source})"
    return say.warning(section, value, f"Write it as in {SECTIONS[section.partition('.')[0]]}")


def _check_section(section: str) -> Iterator[Finding]:
    name = section.removeprefix("jobqueue.")
    near = difflib.get_close_matches(name, systems(), 1, ALIKE)
    if section != "hpcdask" and system_of(section) is None and near:
        value = f"is no queueing system's, and read only with config_name={name!r}"
        yield say.warning(section, value, f"Did you mean jobqueue.{near[0]}?")


def _check_key(row: Facts, system: str | None) -> Iterator[Finding]:
    key = row["key"].partition(".")[0]
    known = OWN_KEYS if row["section"] == "hpcdask" else _keys(system)
    if key not in known:
        yield say.warning(row["section"], "no such key, so without effect", _meant(key, known))


def _check_value(row: Facts) -> Iterator[Finding]:
    key, value = row["key"], row["value"]
    if key in ("cores", "processes") and not (value.isdecimal() or not value):
        example = f"Write it as in {key}: 16"
        yield say.warning(row["section"], f"{value!r} is not a whole number", example)
    if key == "walltime" and value.isdecimal():
        example = "Write it in quotes, as in walltime: '10:00:00'"
        yield say.warning(row["section"], f"{value} is a number", example)
    if key == "memory" and value:
        try:
            parse_bytes(value)
        except ValueError:
            example = "Write it as in memory: 64GiB"
            yield say.warning(row["section"], f"{value!r} is no amount of memory", example)
    if key in LISTS and value and not value.startswith("["):
        example = f"Write it as in {key}: ['{value}']"
        yield say.warning(row["section"], "is a text, not a list of lines", example)


def _meant(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"Did you mean {near[0]}?" if near else f"There are {', '.join(sorted(known))}"


@functools.cache
def _keys(system: str | None) -> Collection[str]:
    """The keys of a system's section, or of any: those for which dask-jobqueue has defaults."""
    spec = importlib.util.find_spec("dask_jobqueue")  # its import writes a file
    assert spec is not None
    assert spec.origin is not None
    defaults = os.path.join(os.path.dirname(spec.origin), "jobqueue.yaml")
    ((_, content),) = dask.config.collect_yaml([defaults], return_paths=True)
    sections = content["jobqueue"]
    return set().union(*([sections[system]] if system in sections else sections.values()))


def _check_folder(row: Facts, in_job: bool) -> Iterator[Finding]:
    if not row.get("obstacle"):
        return
    what, _, advice = row["obstacle"].partition(": ")
    if row["key"] == "local-directory" and not in_job:
        advice = "It is a folder of the nodes: see srun hpcdask doctor there"
        yield say.note(row["section"], what, advice)
    else:
        mends = f"To fix it: {advice}" if advice else "Name a folder in which every user may write"
        yield say.warning(row["section"], what, mends)


def _check_queue(row: Facts, there: Collection[str]) -> Iterator[Finding]:
    if row["key"] == "queue" and there:
        for name in filter(None, map(str.strip, row["value"].split(","))):
            if name not in there:
                value = f"the queueing system has no {name}"
                yield say.warning(row["section"], value, _meant(name, there))


def _own_interface(section: str, rows: Sequence[Facts]) -> bool:
    """Return whether a section names the scheduler's interface apart from that of its workers."""
    return any((row["section"], row["key"]) == (section, SCHEDULER_INTERFACE) for row in rows)


def _check_interface(row: Facts, there: Collection[str], in_job: bool) -> Iterator[Finding]:
    name = row["value"]
    used = row["key"] == "interface" or (row["key"] == SCHEDULER_INTERFACE and not in_job)
    if used and name and there and name not in there:
        value = f"this machine has no interface {name}"
        yield say.warning(row["section"], value, _meant(name, there))
