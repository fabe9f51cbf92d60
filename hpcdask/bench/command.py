"""``hpcdask bench``: measure the bundled workloads on this machine or on a cluster.

Where no cluster is given or surrounds the program, the command starts itself again as the program
of the runner, which makes a cluster of this machine, or of the ranks of ``mpirun`` and ``srun``.
One JSON line per measurement goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import dask
from dask.utils import parse_bytes

from hpcdask import ranks
from hpcdask.bench.cluster import Cluster, connect, inspect
from hpcdask.bench.exchange import heat_map, run_exchange
from hpcdask.bench.exchange_report import MAX_LINES, table
from hpcdask.bench.measurements import run_array, run_svd
from hpcdask.bench.records import decimal_bytes, report, say
from hpcdask.errors import HpcdaskError, UsageError
from hpcdask.workloads import WorkloadError

__all__ = ["bench", "main"]


class Size(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes with a unit."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Parse ``200GB`` and the like."""
        try:
            nbytes = int(parse_bytes(value))
        except (ValueError, OverflowError):
            nbytes = 0
        if nbytes < 1:
            forms = "a number of bytes with a unit, such as 200GB, 64GiB or 2TB"
            self.fail(f"{value!r} is not a size: {forms}", param, ctx)
        return nbytes


class Picture(click.ParamType):  # type: ignore[type-arg]
    """A file for a picture, of which is known before anything is measured that it can be made."""

    name = "picture"

    def convert(self, value: Any, param: Any, ctx: Any) -> Path:
        """Take an ``.svg`` in a folder where files can be made."""
        path = Path(value)
        if path.suffix != ".svg":
            self.fail(f"{value!r}: pictures are SVG, so the name has to end in .svg", param, ctx)
        if not os.access(path.parent, os.W_OK) or path.is_dir():
            self.fail(f"{value!r} cannot be written: no such folder, or not yours", param, ctx)
        return path


def common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that all commands have."""
    for option in (
        click.option(
            "--json",
            "json_file",
            type=click.Path(dir_okay=False),
            metavar="FILE",
            help="Append the JSON line to this file.",
        ),
        click.option("--scheduler-file", metavar="FILE", help="Use the cluster of this file."),
        click.option("--repeats", type=click.IntRange(1), default=3, show_default=True),
        click.option(
            "--device",
            type=click.Choice(["auto", "cuda", "cpu"]),
            default="auto",
            show_default=True,
        ),
    ):
        command = option(command)
    return command


def form_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of workloads that have two forms."""
    for option in (
        click.option(
            "--chunk-size", "chunk_nbytes", type=Size(), help="Largest chunk of the tuned form."
        ),
        click.option(
            "--form", type=click.Choice(["tuned", "stock"]), default="tuned", show_default=True
        ),
    ):
        command = option(command)
    return command


def _execute(
    run: Callable[..., dict[str, Any]],
    *,
    scheduler_file: str | None,
    device: str,
    json_file: str | None,
    finish: Callable[[dict[str, Any]], None] | None = None,
    **how: Any,
) -> None:
    if scheduler_file is None and dask.config.get("scheduler-address", None) is None:
        _surround(click.get_current_context().find_root().obj, device)
    try:
        with connect(scheduler_file) as client:
            line = run(inspect(client, device), **how)
        code = report(line, json_file)  # before a picture can fail
        if finish is not None:
            finish(line)
    except WorkloadError as exc:
        raise UsageError(str(exc)) from exc
    except OSError as exc:
        raise UsageError(f"{type(exc).__name__}: {exc}") from exc
    if code:
        raise SystemExit(code)


@click.group("bench", context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure what a cluster delivers, and how far it is from what its hardware allows.

    Alone, on all devices of this machine; under mpirun or srun, on theirs; with --scheduler-file,
    on that cluster.
    """


@bench.command("array")
@click.option("--size", type=Size(), default="2TB", show_default=True, help="Bytes of float64.")
@form_options
@common_options
def array_command(size: int, **options: Any) -> None:
    """Time (normal(10, 1) + 1)[::2, ::2].sum() of a square float64 array."""
    _execute(functools.partial(run_array, nbytes=size), **options)


@bench.command("svd")
@click.option("--size", type=Size(), default="200GB", show_default=True, help="Bytes of uint8.")
@click.option("--k", type=int, default=10, show_default=True, help="Singular values wanted.")
@form_options
@common_options
def svd_command(size: int, k: int, **options: Any) -> None:
    """Time the truncated SVD of a tall uint8 matrix held by the workers."""
    _execute(functools.partial(run_svd, nbytes=size, k=k), **options)


@bench.command("exchange")
@click.option(
    "--size",
    type=Size(),
    help="Bytes of a block from one worker to another. Default: 256MB on GPUs, 16MB without, less "
    "where memory is short.",
)
@click.option(
    "--transpose-size",
    type=Size(),
    help="Bytes of x in x + x.T. Default: 8GB on GPUs, 512MB without, less where memory is short.",
)
@click.option("--alone", is_flag=True, help="One pair of workers at a time.")
@click.option(
    "--picture", type=Picture(), metavar="FILE.svg", help="Draw the bandwidths as a heat map."
)
@common_options
def exchange_command(
    size: int | None,
    transpose_size: int | None,
    alone: bool,
    picture: Path | None,
    **options: Any,
) -> None:
    """Time what workers exchange: pair by pair, all to all, and x + x.T; name who is slow."""

    def run(cluster: Cluster, repeats: int) -> dict[str, Any]:
        line = run_exchange(cluster, size, transpose_size, repeats=repeats, alone=alone)
        _tell_exchange(line["result"])
        return line

    def draw(line: dict[str, Any]) -> None:
        if picture is not None:
            picture.write_text(heat_map(line), encoding="utf-8")

    _execute(run, finish=draw, **options)


def _tell_exchange(result: dict[str, Any]) -> None:
    click.echo(table(result), err=True)
    for finding in result["slow"][:MAX_LINES]:
        say(f"warning: {finding['text']}")
    if len(result["slow"]) > MAX_LINES:
        say(f"warning: {len(result['slow']) - MAX_LINES} more are in the JSON line")
    every, square = result["all_to_all"], result["transpose"]
    block, crossing = decimal_bytes(every["block_bytes"]), decimal_bytes(square["bytes_to_cross"])
    say(f"all to all: {every['GB/s']:.3g} GB/s in all, {block} for each pair")
    say(f"x + x.T: {crossing} of {decimal_bytes(square['bytes'])} have to cross; times are:")


def _surround(argv: Sequence[str], device: str) -> None:
    """Become the program of the runner, which makes a cluster of this machine or these ranks."""
    options = [] if device == "auto" else ["--device", device]
    command = [sys.executable, "-m", "hpcdask.run", *options, "-m", "hpcdask.bench", *argv]
    sys.stdout.flush()
    os.execv(command[0], command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hpcdask bench``.

    Parameters
    ----------
    argv
        Arguments; those of the process by default.

    Returns
    -------
    int
        Exit code: 0, 1 for a wrong result or a cluster that lost a part, 2 for bad input.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        bench.main(arguments, prog_name="hpcdask bench", standalone_mode=False, obj=arguments)
    except click.ClickException as exc:
        return _refuse(exc.format_message(), 2)
    except HpcdaskError as exc:
        return _refuse(str(exc), exc.exit_code)
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else 1
    return 0


def _refuse(text: str, code: int) -> int:
    rank = ranks.detect()
    if rank is not None and rank.index:
        return 0  # mpirun would kill rank 0 before it has said so
    say(f"error: {text}")
    return code
