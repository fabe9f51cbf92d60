"""``hpcdask bench``: measure the bundled workloads on this machine or on a cluster.

On a terminal a table goes to stdout, elsewhere one JSON line per measurement; all else to stderr.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click
from click.core import ParameterSource

from hpcdask.bench import summary, table
from hpcdask.bench.array import run_array, run_pattern
from hpcdask.bench.cluster import Cluster
from hpcdask.bench.compare import compare_files
from hpcdask.bench.exchange import heat_map, run_exchange
from hpcdask.bench.execution import Measurement, check_outputs, execute, reported
from hpcdask.bench.options import COMMON, FORMS, OUTPUTS, OutputFile, Size, options, repeats_option
from hpcdask.bench.records import tell
from hpcdask.bench.startup import run_startup
from hpcdask.bench.svd import check_form, run_svd, run_svd_exact
from hpcdask.bench.zarr import run_zarr
from hpcdask.bootstrap import ranks
from hpcdask.errors import HpcdaskError, UsageError
from hpcdask.gpu.devices import visible_gpus
from hpcdask.logs import say
from hpcdask.workloads import Device, Form
from hpcdask.workloads.array import NAMES

SVD_NBYTES = 200 * 10**9
EXACT_NBYTES = 16 * 10**8
TABLE_NBYTES = 2 * 10**12
#: Bytes for each worker thread: seconds for each, and the Dask blog's sizes on 8 GPUs.
SIZES: dict[Device, dict[str, int]] = {
    "cuda": {
        "array": 250 * 10**9,
        "operation": 8 * 10**9,
        "svd": 25 * 10**9,
        "exact": 1600 * 10**6,
        "zarr": 10**9,
    },
    "cpu": {
        "array": 800 * 10**6,  # stock chunks are as large as that
        "operation": 64 * 10**6,
        "svd": 100 * 10**6,
        "exact": 200 * 10**6,
        "zarr": 100 * 10**6,
    },
}


class Workloads(click.Group):
    """The workloads, whose options stand behind them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the group's own options."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            having = [
                name
                for name, command in self.commands.items()
                if any(error.option_name in param.opts for param in command.params)
            ]
            if not having:
                raise
            one = "all" if "all" in having else having[0]
            raise UsageError(
                f"{error.option_name} is an option of workloads, and stands behind one: "
                f"hpcdask bench {one} {error.option_name} …"
            ) from None


@click.group(
    "bench",
    cls=Workloads,
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
        if ctx.invoked_subcommand is not None:
            raise UsageError(
                f"--compare reads two files; to measure {ctx.invoked_subcommand}, leave it out"
            )
        text, code = compare_files(*compare)
        click.echo(text)
        raise SystemExit(code)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@bench.command("array")
@click.option(
    "--size",
    type=Size(),
    help="Bytes of float64. Default, for each worker thread: 250GB on GPUs, 800MB without; 8GB and "
    "64MB for operations other than sum.",
)
@click.option(
    "--operation",
    type=click.Choice(["sum", *NAMES]),
    default="sum",
    show_default=True,
    help="sum: (x + 1)[::2, ::2].sum(), as in the Dask blog. The others are plain dask.array.",
)
@options(*COMMON, *FORMS)
def array_command(size: int | None, operation: str, forms: list[Form], **more: Any) -> None:
    """Time computations on a square array of random numbers.

    The numbers are float64, drawn from normal(10, 1).
    """
    if operation == "sum":
        how, rest = _split(more, "repeats", "chunk_nbytes")
        measurements = [_sized("array", run_array, size, form=form, **how) for form in forms]
    else:
        _refuse_beside(f"--operation {operation}", "--form", "--chunk-size")
        how, rest = _split(more, "repeats")
        rest.pop("chunk_nbytes")
        measurements = [_sized("operation", run_pattern, size, operation=operation, **how)]
    execute(measurements, **rest)


def _split(options: dict[str, Any], *names: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take the options of a measurement from those of `execute`."""
    return {name: options.pop(name) for name in names}, options


def _sized(name: str, run: Measurement, nbytes: int | None = None, **how: Any) -> Measurement:
    """Return a measurement whose size, if it is not given, suits the cluster."""

    def measure(cluster: Cluster, timeline: bool) -> dict[str, Any]:
        size = nbytes or SIZES[cluster.device][name] * cluster.n_slots
        return run(cluster, nbytes=size, timeline=timeline, **how)

    return measure


@bench.command("svd")
@click.option(
    "--size",
    type=Size(),
    help="Bytes of the matrix. Default: 200GB of uint8; 1.6GB of float64 with --exact.",
)
@click.option(
    "--k", type=int, metavar="N", default=10, show_default=True, help="Singular values wanted."
)
@click.option("--packed", is_flag=True, help="Pack four values from 0 to 3 into a byte.")
@click.option("--stream", is_flag=True, help="Make the matrix anew whenever it is read.")
@click.option("--exact", is_flag=True, help="Time dask.array.linalg.svd of 20 columns of float64.")
@options(*COMMON, *FORMS)
def svd_command(size: int | None, exact: bool, forms: list[Form], **more: Any) -> None:
    """Time the singular value decomposition of a tall matrix.

    The workers hold the matrix.
    """
    names = "k", "packed", "stream", "chunk_nbytes"
    how, rest = _split(more, *names)
    repeats = rest.pop("repeats")
    if exact:
        _refuse_beside("--exact", "--k", "--packed", "--stream", "--form", "--chunk-size")
        run: Measurement = partial(run_svd_exact, nbytes=size or EXACT_NBYTES, repeats=repeats)
        return execute([run], **rest)
    for form in forms:
        check_form(form, packed=how["packed"], stream=how["stream"])
    run = partial(run_svd, nbytes=size or SVD_NBYTES, repeats=repeats, **how)
    return execute([partial(run, form=form) for form in forms], **rest)


def _refuse_beside(option: str, *others: str) -> None:
    """Raise UsageError if one of the other options was given: plain dask.array has none of them."""
    context = click.get_current_context()
    given = [
        name
        for param in context.command.params
        for name in param.opts
        if name in others
        and context.get_parameter_source(param.name or "") is not ParameterSource.DEFAULT
    ]
    if given:
        raise UsageError(f"{option} takes no {', '.join(given)}: it measures plain dask.array")


@bench.command("zarr")
@click.option(
    "--size", type=Size(), default="2GB", show_default=True, help="Bytes of genotypes to make."
)
@click.option(
    "--path",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Your own store, or where to make one. Default: a temporary folder.",
)
@click.option("--component", metavar="NAME", help="Name of the array, in a store with several.")
@options(*COMMON, repeats_option)
def zarr_command(size: int, **more: Any) -> None:
    """Time the population structure of genotypes in a Zarr store."""
    how, rest = _split(more, "path", "component", "repeats")
    execute([partial(run_zarr, nbytes=size, **how)], **rest)


@bench.command("startup")
@options(*COMMON)
def startup_command(**options: Any) -> None:
    """Show where the time from launch to workers goes."""
    execute([run_startup], **options)


@bench.command("table")
@click.option("--size", type=Size(), help="Bytes of the array on GPUs. Default: 2TB.")
@click.option(
    "--cpu-size",
    type=Size(),
    default="8GB",
    show_default=True,
    help="Bytes of the array on CPU cores.",
)
@options(*OUTPUTS, repeats_option)
def table_command(
    size: int | None, cpu_size: int, repeats: int, json_file: Path | None, report_file: Path | None
) -> None:
    """Time the reference array on cores and GPUs of this machine.

    A row each: one core, all cores, one GPU, all GPUs.
    """
    if (rank := ranks.detect()) is not None and rank.size > 1:
        raise UsageError("the table starts clusters of its own: run it without mpirun and srun")
    check_outputs(json_file, report_file)
    gpus = [gpu.uuid for gpu in visible_gpus()]
    if size is not None and not gpus:
        raise UsageError("--size is that on GPUs, and this machine has none: see --cpu-size")
    try:
        with reported(report_file) as lines:
            for row in table.rows(os.sched_getaffinity(0), gpus):
                nbytes = cpu_size if row.device == "cpu" else size or TABLE_NBYTES
                for line in table.run_row(row, nbytes, repeats):
                    lines.append(line)
                    tell(line, json_file, as_json=not summary.is_terminal())
            table.show(lines)
    except OSError as exc:
        raise UsageError(f"{type(exc).__name__}: {exc}") from exc


@bench.command("all")
@options(*COMMON, repeats_option)
def all_command(repeats: int, **options: Any) -> None:
    """Measure all workloads, at sizes that suit the cluster.

    It leaves out what cannot be measured there, and says why.
    """

    forms = get_args(Form)
    how: dict[str, Any] = {"repeats": repeats}
    measurements: list[Measurement] = [
        run_startup,
        *(_sized("array", run_array, form=form, **how) for form in forms),
        *(_sized("operation", run_pattern, operation=name, **how) for name in NAMES),
        *(_sized("svd", run_svd, form=form, **how) for form in forms),
        _sized("svd", run_svd, packed=True, **how),
        _sized("exact", run_svd_exact, **how),
        _sized("zarr", run_zarr, **how),
        partial(run_exchange, **how),
    ]
    execute(measurements, leave_out=True, **options)


@bench.command("exchange")
@click.option(
    "--size",
    type=Size(),
    help="Bytes of a block from one worker to another. Default: 256MB on GPUs, 16MB without; less "
    "where memory is short.",
)
@click.option(
    "--transpose-size",
    type=Size(),
    help="Bytes of x in x + x.T. Default: 8GB on GPUs, 512MB without; less where memory is short.",
)
@click.option("--alone", is_flag=True, help="Measure one pair of workers at a time.")
@click.option(
    "--picture",
    type=OutputFile(".svg"),
    metavar="FILE.svg",
    help="Draw the bandwidths as a heat map.",
)
@options(*COMMON, repeats_option)
def exchange_command(picture: Path | None, **more: Any) -> None:
    """Time transfers between workers, pair by pair and all to all.

    It also times x + x.T, and names slow workers.
    """

    def draw(line: dict[str, Any]) -> None:
        if picture is not None:
            picture.write_text(heat_map(line), encoding="utf-8")

    how, rest = _split(more, "size", "transpose_size", "repeats", "alone")
    nbytes, square_nbytes = how.pop("size"), how.pop("transpose_size")
    run = partial(run_exchange, nbytes=nbytes, square_nbytes=square_nbytes, **how)
    execute([run], finish=draw, **rest)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hpcdask bench``; 1 is for a wrong result or a lost cluster, 2 for bad input."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        bench.main(arguments, prog_name="hpcdask bench", standalone_mode=False, obj=arguments)
    except click.ClickException as exc:
        return _refuse(exc.format_message(), 2)
    except (click.Abort, KeyboardInterrupt):
        return _refuse("interrupted", 128 + signal.SIGINT)
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
