"""Where Dask's configuration is from: dask itself does not keep that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import dask.config

#: All of a parent's configuration, which has its sources there.
INHERITED = "DASK_INTERNAL_INHERIT_CONFIG"


def sources() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each file and variable of the configuration with what it says; later ones are stronger."""
    for path, content in dask.config.collect_yaml(dask.config.paths, return_paths=True):
        yield str(path), content
    for name in sorted(os.environ):
        if name.startswith("DASK_") and name != INHERITED:
            yield f"variable {name}", dask.config.collect_env({name: os.environ[name]})


def named(key: str) -> str:
    """A key with the file or variable of its value, for messages."""
    found = ["Dask's configuration"]
    found += [
        source
        for source, content in sources()
        if dask.config.get(key, None, config=content) is not None
    ]
    return f"{key} ({found[-1]})"
