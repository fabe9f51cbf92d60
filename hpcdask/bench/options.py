"""Options of ``hpcdask bench``: their types, and those that several workloads have."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from dask.utils import parse_bytes


class Size(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes with a unit."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Parse ``200GB`` and the like."""
        nbytes = 0
        if any(map(str.isdigit, str(value))):  # parse_bytes takes "" for 1
            with contextlib.suppress(ValueError, OverflowError):
                nbytes = int(parse_bytes(value))
        if nbytes < 1:
            forms = "a number of bytes with a unit, such as 200GB, 64GiB or 2TB"
            self.fail(f"{value!r} is not a size: {forms}", param, ctx)
        return nbytes


class OutputFile(click.ParamType):  # type: ignore[type-arg]
    """A path that is checked for writability before the measurement starts."""

    name = "file"

    def __init__(self, suffix: str = "") -> None:
        self.suffix = suffix

    def convert(self, value: Any, param: Any, ctx: Any) -> Path:
        """Take a name with the right suffix, in a folder where files can be made."""
        path = Path(value)
        if self.suffix and path.suffix != self.suffix:
            self.fail(f"{value!r}: the name has to end in {self.suffix}", param, ctx)
        if not _can_be_written(path):
            self.fail(f"{value!r} cannot be written: no such folder, or not yours", param, ctx)
        return path


def _can_be_written(path: Path) -> bool:
    if os.path.exists(path):  # also /dev/stdout, whose folder is not the user's
        return os.access(path, os.W_OK) and not path.is_dir()
    return os.access(path.parent, os.W_OK | os.X_OK)


repeats_option = click.option(
    "--repeats",
    type=click.IntRange(1),
    metavar="N",
    default=3,
    show_default=True,
    help="Timed runs.",
)
COMMON = (
    click.option(
        "--report",
        "report_file",
        type=OutputFile(".html"),
        metavar="FILE.html",
        help="Write a web page with charts.",
    ),
    click.option(
        "--json",
        "json_file",
        type=OutputFile(),
        metavar="FILE",
        help="Append the results to this file, as JSON lines.",
    ),
    click.option("--scheduler-file", metavar="FILE", help="Use the cluster of this file."),
    click.option(
        "--device",
        type=click.Choice(["auto", "cuda", "cpu"]),
        default="auto",
        show_default=True,
        help="What workers compute on. auto: GPUs where there are any, else the CPU.",
    ),
)
FORMS = (
    repeats_option,
    click.option(
        "--chunk-size",
        "chunk_nbytes",
        type=Size(),
        help="Largest chunk of the tuned form, in bytes.",
    ),
    click.option(
        "--form",
        "forms",
        type=click.Choice(["tuned", "stock", "both"]),
        default="tuned",
        show_default=True,
        callback=lambda _ctx, _option, form: ["tuned", "stock"] if form == "both" else [form],
        help="tuned: hpcdask's version. stock: plain dask.array.",
    ),
)


def options(*some: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add options to a command, the last one first in its help."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in some:
            command = option(command)
        return command

    return add
