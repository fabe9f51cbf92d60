"""The commands that measure the bundled workloads on the cluster that surrounds the program.

Started by ``python -m hpcdask.workloads.array`` and ``python -m hpcdask.workloads.svd``, usually
inside ``python -m hpcdask.run -m …``. One JSON line per measurement goes to stdout, everything
else to stderr.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import click
from dask.utils import parse_bytes

from hpcdask.cluster_info import connect, inspect
from hpcdask.errors import UsageError
from hpcdask.measurements import run_array, run_svd
from hpcdask.records import report, say
from hpcdask.workloads import WorkloadError

__all__ = ["array_command", "inspect", "main", "report", "run_array", "run_svd", "svd_command"]


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


def common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that both commands have."""
    for option in (
        click.option(
            "--json",
            "json_file",
            type=click.Path(dir_okay=False),
            metavar="FILE",
            help="Append the JSON line to this file.",
        ),
        click.option("--scheduler-file", metavar="FILE", help="Use the cluster of this file."),
        click.option(
            "--chunk-size", "chunk_nbytes", type=Size(), help="Largest chunk of the tuned form."
        ),
        click.option("--repeats", type=click.IntRange(1), default=3, show_default=True),
        click.option(
            "--device",
            type=click.Choice(["auto", "cuda", "cpu"]),
            default="auto",
            show_default=True,
        ),
        click.option(
            "--form", type=click.Choice(["tuned", "stock"]), default="tuned", show_default=True
        ),
    ):
        command = option(command)
    return command


def _execute(
    workload: str,
    run: Callable[..., dict[str, Any]],
    *,
    scheduler_file: str | None,
    device: str,
    json_file: str | None,
    **how: Any,
) -> None:
    try:
        with connect(workload, scheduler_file) as client:
            code = report(run(inspect(client, device), **how), json_file)
    except WorkloadError as exc:
        raise UsageError(str(exc)) from exc
    except OSError as exc:
        raise UsageError(f"{type(exc).__name__}: {exc}") from exc
    if code:
        raise SystemExit(code)


@click.command("array")
@click.option("--size", type=Size(), default="2TB", show_default=True, help="Bytes of float64.")
@common_options
def array_command(size: int, **options: Any) -> None:
    """Time (normal(10, 1) + 1)[::2, ::2].sum() of a square float64 array."""
    _execute("array", functools.partial(run_array, nbytes=size), **options)


@click.command("svd")
@click.option("--size", type=Size(), default="200GB", show_default=True, help="Bytes of uint8.")
@click.option("--k", type=int, default=10, show_default=True, help="Singular values wanted.")
@common_options
def svd_command(size: int, k: int, **options: Any) -> None:
    """Time the truncated SVD of a tall uint8 matrix held by the workers."""
    _execute("svd", functools.partial(run_svd, nbytes=size, k=k), **options)


def main(workload: str, argv: Sequence[str] | None = None) -> int:
    """Run the command of a workload.

    Parameters
    ----------
    workload
        ``"array"`` or ``"svd"``.
    argv
        Arguments; those of the process by default.

    Returns
    -------
    int
        Exit code: 0, 1 for a wrong result, 2 for bad input.
    """
    command = {"array": array_command, "svd": svd_command}[workload]
    try:
        command.main(
            list(argv) if argv is not None else None,
            prog_name=f"python -m hpcdask.workloads.{workload}",
            standalone_mode=False,
        )
    except click.ClickException as exc:
        say(f"error: {exc.format_message()}")
        return 2
    except UsageError as exc:
        say(f"error: {exc}")
        return exc.exit_code
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else 1
    return 0
