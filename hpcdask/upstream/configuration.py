"""Where Dask's configuration is from: dask itself does not keep that."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcdask.errors import UsageError

#: All of a parent's configuration, which has its sources there.
INHERITED = "DASK_INTERNAL_INHERIT_CONFIG"
#: Dask's error for a file that is no YAML, or no mapping; its import raises it.
MALFORMED = re.compile(r"A dask config file at '(.+)' is malformed(?:, original.*:| -)\s+")


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Where Dask may be imported, a file that it cannot read is a UsageError of one line."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        if (found := MALFORMED.match(text)) is None:
            raise
        # YAML quotes the lines that it means, further indented than its words
        lines = [line for line in text[found.end() :].splitlines() if not line.startswith("    ")]
        what = " ".join(" ".join(lines).split()).replace('in "<unicode string>", line', "in line")
        raise UsageError(
            f"{found[1]} is not what Dask reads as configuration: {what.rstrip(':')}. Correct that "
            "file, or move it away"
        ) from None


def unreadable() -> list[str]:
    """Files of the configuration that this user may not read; Dask leaves them out in silence."""
    import dask.config

    files = []
    for path in map(Path, dask.config.paths):
        with contextlib.suppress(OSError):
            files += [path] if path.is_file() else sorted(path.glob("*.y*ml"))
    return [str(path) for path in files if not os.access(path, os.R_OK)]


def sources() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each file and variable of the configuration with what it says; later ones are stronger."""
    import dask.config

    for path, content in dask.config.collect_yaml(dask.config.paths, return_paths=True):
        yield str(path), content
    for name in sorted(os.environ):
        if name.startswith("DASK_") and name != INHERITED:
            yield f"variable {name}", dask.config.collect_env({name: os.environ[name]})


def source_of(key: str) -> str:
    """The file or variable that a key's value is from."""
    import dask.config

    found = ["Dask's configuration"]
    found += [
        source
        for source, content in sources()
        if dask.config.get(key, None, config=content) is not None
    ]
    return found[-1]


def named(key: str) -> str:
    """A key with the file or variable of its value, for messages."""
    return f"{key} ({source_of(key)})"
