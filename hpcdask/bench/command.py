"""``hpcdask bench``: measure the bundled workloads on this machine or on a cluster.

On a terminal a table goes to stdout, elsewhere one JSON line per measurement; all else to stderr.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click
from dask.utils import parse_bytes

from hpcdask.bench.arrays import run_array, run_svd, run_svd_exact, run_zarr
from hpcdask.bench.cluster import Cluster
from hpcdask.bench.compare import compare_files
from hpcdask.bench.exchange import run_exchange
from hpcdask.bench.execution import execute
from hpcdask.bench.measurement import Measurement
from hpcdask.bench.startup import run_startup
from hpcdask.bootstrap import ranks
from hpcdask.errors import HpcdaskError, UsageError
from hpcdask.logs import complain
from hpcdask.workloads import Form
from hpcdask.workloads.plain_array import NAMES

Runs = list[Callable[[Cluster], Measurement]]
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def size(text: str) -> int:
    """Parse a number of bytes with a unit."""
    with contextlib.suppress(ValueError, OverflowError):
        # parse_bytes takes "" for 1
        if re.search(r"\d", text) and (nbytes := int(parse_bytes(text))) > 0:
            return nbytes
    forms = "a number of bytes with a unit, such as 200GB, 64GiB or 2TB"
    raise click.BadParameter(f"{text!r} is not a size: {forms}")


def file(text: str) -> Path:
    """Check that a file can be written, before the measurement starts."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise click.BadParameter(f"{text!r} cannot be written: no such folder, or not yours")
    return path


#: Options of all workloads.
COMMON = (
    click.option(
        "--device",
        type=click.Choice(["auto", "cuda", "cpu"]),
        default="auto",
        show_default=True,
        help="What workers compute on. auto: GPUs where there are any, else the CPU.",
    ),
    click.option("--scheduler-file", metavar="FILE", help="Use the cluster of this file."),
    click.option(
        *("--json", "json_file"),
        type=file,
        help="Append the results to this file, as JSON lines.",
    ),
    click.option(
        *("--report", "report_file"),
        type=file,
        metavar="FILE.html",
        help="Write a web page with charts.",
    ),
)
REPEATS = click.option(
    "--repeats",
    type=click.IntRange(1),
    metavar="N",
    default=3,
    show_default=True,
    help="Timed runs.",
)
CHUNK_SIZE = click.option(
    *("--chunk-size", "chunk_nbytes"),
    type=size,
    help="Largest chunk of the tuned form, in bytes.",
)
FORM = click.option(
    "--form",
    type=click.Choice(["tuned", "stock", "both"]),
    help="tuned: hpcdask's version. stock: plain dask.array. Default: tuned, where there is one.",
)


size_option = partial(click.option, "--size", "nbytes", type=size)


@click.group(
    "bench",
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    epilog="Example: hpcdask bench array --size 10GB --form both",
)
@click.option(
    "--compare",
    nargs=2,
    type=click.Path(exists=True, dir_okay=False),
    metavar="BEFORE.json AFTER.json",
    help="Show what got slower. The exit code is 1 if anything did.",
)
@click.pass_context
def bench(ctx: click.Context, compare: tuple[str, str] | None) -> None:
    """Measure a cluster, and compare it with its hardware's limits.

    By itself it uses all devices of this machine. Under mpirun or srun it uses their ranks, and
    with --scheduler-file that cluster. On a terminal the results are a table,
    elsewhere one JSON line each.

    \b
        hpcdask bench all --report report.html
        mpirun -n 8 hpcdask bench array --size 2TB --form both
    """
    if compare is not None:
        ctx.exit(compare_files(*compare))
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def workload(name: str, *options: Decorator) -> Decorator:
    """Make a command that executes what a function returns for the options."""

    def decorate(function: Callable[..., Runs]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(**given: Any) -> int:
            if more := click.get_current_context().args:
                raise UsageError(
                    f"hpcdask bench measures one workload: run hpcdask bench {name}, then hpcdask "
                    f"bench {more[0]}, or hpcdask bench all"
                )
            common = ("device", "scheduler_file", "json_file", "report_file")
            how = {name: given.pop(name) for name in common}
            files = [how[name].resolve() for name in common[2:] if how[name]]
            if len(files) > len(set(files)):
                raise UsageError(f"--json and --report are both {files[0]}: name two files")
            return execute(function(**given), leave_out=name == "all", **how)

        for option in reversed((*options, *COMMON)):
            command = option(command)
        return bench.command(name, context_settings={"allow_extra_args": True})(command)

    return decorate


@workload(
    "array",
    size_option(
        help="Bytes of float64. Default, for each GPU or thread: 250GB on GPUs (plain dask.array "
        "50GB), 200MB without; 2GB and 32MB for operations other than sum."
    ),
    click.option(
        "--operation",
        type=click.Choice(NAMES),
        default="sum",
        show_default=True,
        help="sum: (x + 1)[::2, ::2].sum(), as in the Dask blog. The others are plain dask.array.",
    ),
    *(FORM, CHUNK_SIZE, REPEATS),
)
def array_command(operation: str, form: Any, **how: Any) -> Runs:
    """Time computations on a square array of random numbers.

    The numbers are float64, drawn from normal(10, 1).
    """
    if operation == "sum":
        return [partial(run_array, form=one, **how) for one in _forms(form)]
    if form or how["chunk_nbytes"]:
        raise UsageError(f"--operation {operation} takes no --form, --chunk-size")
    return [partial(run_array, form="stock", operation=operation, **how)]


@workload(
    "svd",
    size_option(
        help="Bytes of the matrix. Default, for each GPU or thread: 25GB of uint8 on GPUs (plain "
        "dask.array 2.5GB), 100MB without; 800MB and 200MB of float64 with --exact."
    ),
    click.option("--k", type=int, metavar="N", help="Singular values wanted. Default: 10."),
    click.option("--packed", is_flag=True, help="Pack four values from 0 to 3 into a byte."),
    click.option(
        "--exact", is_flag=True, help="Time dask.array.linalg.svd of 20 columns of float64."
    ),
    *(FORM, CHUNK_SIZE, REPEATS),
)
def svd_command(nbytes: int | None, repeats: int, exact: bool, **own: Any) -> Runs:
    """Time the singular value decomposition of a tall matrix.

    The workers hold the matrix.
    """
    how: dict[str, Any] = {"nbytes": nbytes, "repeats": repeats}
    if exact:
        if any(own.values()):
            raise UsageError("--exact takes no --k, --packed, --form, --chunk-size")
        return [partial(run_svd_exact, **how)]
    forms = _forms(own.pop("form"))
    if own["packed"] and "stock" in forms:
        raise UsageError("--packed is for the tuned form: dask.array has no arithmetic for it")
    return [partial(run_svd, form=one, **how, **own) for one in forms]


def _forms(form: Any) -> Sequence[Form]:
    return get_args(Form) if form == "both" else [form or "tuned"]


@workload(
    "zarr",
    size_option(help="Bytes of genotypes to make.", default="2GB", show_default=True),
    click.option(
        "--path",
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        help="Your own store, or where to make one. Default: a temporary folder.",
    ),
    click.option("--component", metavar="NAME", help="Name of the array, in a store with several."),
    REPEATS,
)
def zarr_command(**how: Any) -> Runs:
    """Time the population structure of genotypes in a Zarr store."""
    return [partial(run_zarr, **how)]


@workload("startup")
def startup_command() -> Runs:
    """Show where the time from launch to workers goes."""
    return [run_startup]


@workload("all", REPEATS)
def all_command(**how: Any) -> Runs:
    """Measure all workloads, at sizes that suit the cluster.

    It leaves out what cannot be measured there, and says why.
    """
    return [
        run_startup,
        *(partial(run_array, form=form, **how) for form in get_args(Form)),
        *(partial(run_array, operation=name, form="stock", **how) for name in NAMES[1:]),
        *(partial(run_svd, form=form, **how) for form in get_args(Form)),
        partial(run_svd, packed=True, **how),
        partial(run_svd_exact, **how),
        partial(run_zarr, **how),
        partial(run_exchange, **how),
    ]


@workload(
    "exchange",
    size_option(
        help="Bytes of a block from one worker to another. Default: 256MB on GPUs, 16MB without; "
        "less where memory is short."
    ),
    click.option("--alone", is_flag=True, help="Measure one pair of workers at a time."),
    REPEATS,
)
def exchange_command(**how: Any) -> Runs:
    """Time transfers between workers, pair by pair and all to all.

    It names slow workers. Of more than 32 workers it measures some pairs.
    """
    return [partial(run_exchange, **how)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hpcdask bench``; 1 is for a wrong result or a lost cluster, 2 for bad input."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        return bench.main(arguments, "hpcdask bench", standalone_mode=False, obj=arguments) or 0
    except click.ClickException as exc:
        text, code = exc.format_message(), 2
        if isinstance(exc, click.NoSuchOption) and exc.ctx and exc.ctx.command is bench:
            text += f" It comes after the workload: hpcdask bench array {exc.option_name} …"
    except click.Abort:
        text, code = "interrupted", 128 + signal.SIGINT
    except HpcdaskError as exc:
        text, code = str(exc), exc.exit_code
    rank = ranks.detect()
    if rank is not None and rank.index:
        return 0  # mpirun would kill rank 0 before it has said so
    complain(text)
    return code
