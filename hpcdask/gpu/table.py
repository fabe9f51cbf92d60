"""Table of a cluster's GPUs, in a terminal and in a notebook."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes

from hpcdask.errors import UsageError
from hpcdask.logs import html_table, text_table

from .monitor import GpuState, monitor_of

if TYPE_CHECKING:
    from distributed import Client

UNKNOWN = "unknown"
COLUMNS = (
    *("node", "GPU", "model", "worker", "utilisation", "memory", "pool", "power", "clock"),
    *("held back by", "temperature", "NVLink", "PCIe", "ECC errors"),
)


class GpuTable(tuple[GpuState, ...]):
    """Table of the GPUs of a cluster's workers, by node and index.

    A tuple of `hpcdask.gpu.monitor.GpuState`. What NVML does not tell of a GPU, such as the power
    of a MIG slice, is unknown.
    """

    @classmethod
    def of(cls, scheduler: Any) -> GpuTable:
        """Return the table of a scheduler in this process."""
        monitor = monitor_of(scheduler)
        return cls(() if monitor is None else monitor.states())

    def summary(self) -> str:
        """Return models, memory in use and utilisation of all together, in one line."""

        def known(name: str) -> list[float]:
            values = (getattr(one.sample, name) for one in self)
            return [value for value in values if value is not None]

        models = Counter(one.sample.model or "GPU" for one in self)
        used, total = known("memory_used"), known("memory_total")
        memory = f"{format_bytes(int(sum(used)))} of {format_bytes(int(sum(total)))}"
        busy = known("utilisation")
        mean = f"{sum(busy) / len(busy):.0f} %" if busy else UNKNOWN
        names = ", ".join(f"{count} x {model}" for model, count in models.items())
        return f"{names}, memory {memory if used and total else UNKNOWN}, utilisation {mean}"

    def __repr__(self) -> str:
        if not self:
            return "no GPU was sampled"
        return text_table([COLUMNS, *map(_row, self)])

    def _repr_html_(self) -> str:
        return html_table([COLUMNS, *map(_row, self)])


def _row(state: GpuState) -> tuple[str, ...]:
    sample = state.sample
    errors = (sample.ecc_corrected, sample.ecc_uncorrected)
    return (
        sample.host,
        sample.label.removeprefix(f"{sample.host} GPU "),
        sample.model or UNKNOWN,
        state.worker,
        _known(sample.utilisation, "{:.0f} %".format),
        " of ".join(_known(one, format_bytes) for one in (sample.memory_used, sample.memory_total)),
        "" if state.pool is None else format_bytes(state.pool),
        _known(sample.power_w, "{:.0f} W".format),
        _known(sample.clock_mhz, "{} MHz".format),
        _known(sample.held_back, ", ".join),
        _known(sample.temperature_c, "{} °C".format),
        _known(state.nvlink, _rate),
        _known(state.pcie, _rate),
        UNKNOWN if None in errors else f"{errors[0]} corrected, {errors[1]} not",
    )


def _known(value: Any, write: Callable[[Any], str]) -> str:
    return UNKNOWN if value is None else write(value)


def _rate(value: float) -> str:
    return f"{format_bytes(int(value))}/s"


def gpus(client: Client | None = None) -> Any:
    """Return the present state of a cluster's GPUs as a table.

    Parameters
    ----------
    client
        A client of a cluster of this package; by default the current one.

    Returns
    -------
    GpuTable
        Empty where workers compute on the CPU, and for some seconds after the start. With an
        asynchronous client, an awaitable of it.

    Raises
    ------
    UsageError
        There is no client.
    """
    from distributed import default_client

    try:
        mine = client or default_client()
    except ValueError as error:
        raise UsageError(
            "hpcdask.gpus: there is no client: connect one first, or name it with client="
        ) from error
    return mine.sync(_fetch, mine)


async def _fetch(client: Client) -> GpuTable:
    return GpuTable(map(GpuState.from_json, await client.run_on_scheduler(_states)))


def _states(dask_scheduler: Any) -> list[dict[str, Any]]:
    return [one.to_json() for one in GpuTable.of(dask_scheduler)]
