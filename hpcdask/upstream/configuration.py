"""Sources of Dask's configuration, which dask itself does not keep."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from hpcdask.errors import UsageError

#: All of a parent's configuration, which has its sources there.
INHERITED = "DASK_INTERNAL_INHERIT_CONFIG"


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Turn Dask's error for a file that it cannot read into a UsageError of one line."""
    try:
        yield
    except ValueError as error:
        text = " ".join(str(error).split())
        if not text.startswith("A dask config file"):
            raise
        raise UsageError(f"{text.rstrip(':')}. Correct that file, or move it away") from None


def files() -> list[str]:
    """Return the files that Dask reads as configuration."""
    import dask.config

    found = list(filter(os.path.isfile, dask.config.paths))
    for folder in filter(os.path.isdir, dask.config.paths):
        with contextlib.suppress(PermissionError):
            found += [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
    return [path for path in found if path.lower().endswith((".json", ".yaml", ".yml"))]


def unreadable() -> list[str]:
    """Return files of the configuration that this user may not read; Dask leaves them out."""
    return [path for path in files() if not os.access(path, os.R_OK)]


def sources() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each file and variable of the configuration with what it says, weakest first."""
    import dask.config

    for path, content in dask.config.collect_yaml(dask.config.paths, return_paths=True):
        yield str(path), content
    for name in sorted(os.environ):
        if name.startswith("DASK_") and name != INHERITED:
            yield f"variable {name}", dask.config.collect_env({name: os.environ[name]})


def source_of(key: str) -> str:
    """Return the file or variable that a key's value is from."""
    import dask.config

    found = "Dask's configuration"
    for source, content in sources():
        if dask.config.get(key, None, config=content) is not None:
            found = source
    return found
