"""The GPUs of a cluster as a table in a terminal and in a notebook."""

from __future__ import annotations

from collections import Counter
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

    A tuple of `hpcdask.gpu.monitor.GpuState`, which is shown as a table. What NVML does not tell of
    a GPU, such as the power of a MIG slice, is unknown.
    """

    @classmethod
    def of(cls, scheduler: Any) -> GpuTable:
        """Return the table of a scheduler in this process."""
        monitor = monitor_of(scheduler)
        return cls(() if monitor is None else monitor.states())

    def summary(self) -> str:
        """Return models, memory in use and utilisation of all together, in one line."""
        samples = [one.sample for one in self]
        models = Counter(sample.model or "GPU" for sample in samples)
        used = [sample.memory_used for sample in samples if sample.memory_used is not None]
        total = [sample.memory_total for sample in samples if sample.memory_total is not None]
        busy = [sample.utilisation for sample in samples if sample.utilisation is not None]
        return ", ".join(
            [
                *(f"{count} x {model}" for model, count in models.items()),
                f"memory {format_bytes(sum(used))} of {format_bytes(sum(total))}"
                if used and total
                else f"memory {UNKNOWN}",
                f"utilisation {sum(busy) / len(busy):.0f} %" if busy else f"utilisation {UNKNOWN}",
            ]
        )

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
        _told(sample.utilisation, "{:.0f} %"),
        f"{_nbytes(sample.memory_used)} of {_nbytes(sample.memory_total)}",
        "" if state.pool is None else format_bytes(state.pool),
        _told(sample.power_w, "{:.0f} W"),
        _told(sample.clock_mhz, "{} MHz"),
        UNKNOWN if sample.held_back is None else ", ".join(sample.held_back),
        _told(sample.temperature_c, "{} °C"),
        _rate(state.nvlink),
        _rate(state.pcie),
        UNKNOWN if None in errors else f"{errors[0]} corrected, {errors[1]} not",
    )


def _told(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else form.format(value)


def _nbytes(value: int | None) -> str:
    return UNKNOWN if value is None else format_bytes(value)


def _rate(value: float | None) -> str:
    return UNKNOWN if value is None else f"{format_bytes(int(value))}/s"


def gpus(client: Client | None = None) -> Any:
    """Return what the GPUs of a cluster do now, as a table.

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
