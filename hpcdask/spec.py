"""WorkerSpec: everything a worker needs, parsed and checked once.

Every launcher turns its options into a `WorkerSpec`, and every process that it starts
gets it back from argv. The command line is made from the fields' metadata, so that an option
exists in one place.
"""

from __future__ import annotations

import dataclasses
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from dask.utils import parse_bytes, parse_timedelta

from .errors import UsageError

Device = Literal["auto", "cuda", "cpu"]
Protocol = Literal["auto", "tcp", "ucx"]
Layout = Literal["shared", "dedicated"]

#: Bytes; an idle worker has some more.
LEAST_MEMORY_LIMIT = 64 << 20


def parse_memory(text: str | int | float | None, name: str) -> int | None:
    """Bytes from ``"64GiB"``, ``"64e9"`` or a number; None from None, ``auto`` and the like.

    Raises
    ------
    UsageError
        The text is none of these; the message lists the accepted forms.
    """
    if text is None or text == "auto":
        return None
    try:
        if isinstance(text, str) and not re.search(r"\d", text):
            raise ValueError(text)  # parse_bytes takes "GiB" and "" for one
        value = int(parse_bytes(text))
        # A fraction, which other tools take, would be 0: no limit.
        if value < 0 or (value == 0 and re.search("[1-9]", str(text))):
            raise ValueError(text)
    except (ValueError, TypeError, AttributeError, OverflowError):
        raise UsageError(
            f"{name}: {text!r} is not an amount of memory. "
            f"Accepted: 64GiB, 64GB, 512MiB, 8e9, a number of bytes, 0 (no limit), auto"
        ) from None
    return value


def parse_device_memory(text: str | int | float | None, name: str) -> int | float | None:
    """Bytes, 0, or a fraction of the worker's own device from ``0.8`` or ``80%``.

    None from None and ``auto``.
    """
    if text is None or text == "auto":
        return None
    percent = isinstance(text, str) and re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    try:
        number = float(percent[1]) / 100 if percent else float(text)
    except (ValueError, TypeError):
        number = 0.0
    if 0 < number <= 1:
        return number
    if text == "none":
        return 0
    try:
        if percent or number % 1:  # more than the device, and no number of bytes
            return parse_memory("", name)
        return parse_memory(text, name)
    except UsageError as error:
        forms = str(error).partition(" is not ")[2]
        raise UsageError(
            f"{name}: {text!r} is not {forms}".replace(
                "0 (no limit), auto", "a fraction of the device such as 0.8 or 80%, 0, auto"
            )
        ) from None


def _parse_memory_limit(text: str | float | None, name: str) -> int | None:
    value = parse_memory(text, name)
    if value is not None and 0 < value < LEAST_MEMORY_LIMIT:
        raise UsageError(
            f"{name}: {text!r} is {value:,} bytes, less than an idle worker has, so it would be "
            f"restarted for ever. Is a unit missing, as in 64GiB?"
        )
    return value


def parse_seconds(text: str | float | None, name: str) -> float | None:
    """Seconds from ``"90s"``, ``"2 min"``, ``"1h30m"``, ``"00:30:00"`` or a number."""
    if text is None or text == "none":
        return None
    try:
        value = _seconds(text.strip()) if isinstance(text, str) else float(text)
        if not 0 < value < math.inf:
            raise ValueError(text)
        return value
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        raise UsageError(
            f"{name}: {text!r} is not a time. "
            f"Accepted: 90s, 5min, 1h30m, 2 hours, 00:30:00, a number of seconds"
        ) from None


def parse_deadline(text: str | float | None, name: str) -> float:
    """Seconds as in `parse_seconds`, of what must have a limit."""
    if (value := parse_seconds(text, name)) is None:
        raise UsageError(f"{name}: it must be a time, such as 5min: nothing waits for ever")
    return value


def _seconds(text: str) -> float:
    if match := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if not re.search(r"\d", text):
        raise ValueError(text)  # parse_timedelta takes "" for 1
    if match := re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text):
        hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float((hours * 60 + minutes) * 60 + seconds)
    return float(parse_timedelta(re.sub(r"mins?$", "minutes", text)))


def parse_resources(text: str | Mapping[str, float] | None, name: str) -> dict[str, float] | None:
    """Worker resources from ``"GPU=2 MEM=10e9"`` (spaces or commas), as distributed takes them."""
    if text is None:
        return None
    try:
        pairs: Any = (
            text.items()
            if isinstance(text, Mapping)
            else (pair.split("=") for pair in text.replace(",", " ").split())
        )
        found = {key: float(value) for key, value in pairs}
        word = re.compile(r"[^\s,=]+")
        if not all(word.fullmatch(key) and 0 <= value < math.inf for key, value in found.items()):
            raise ValueError(text)
        return found
    except ValueError:
        raise UsageError(
            f"{name}: {text!r} is not a list of resources. "
            f"Accepted: GPU=2, or several: GPU=2 MEM=10e9"
        ) from None


#: What stands for a value in the command's help.
METAVARS: dict[Callable[[Any, str], Any], str] = {
    parse_device_memory: "SIZE",
    _parse_memory_limit: "SIZE",
    parse_seconds: "TIME",
    parse_deadline: "TIME",
    parse_resources: "LIST",
}


def _choice(*choices: str) -> Callable[[Any, str], Any]:
    def check(value: Any, name: str) -> Any:
        if value not in choices:
            raise UsageError(f"{name}: {value!r} is not one of {', '.join(choices)}")
        return value

    METAVARS[check] = f"[{'|'.join(choices)}]"
    return check


def _count(minimum: int) -> Callable[[Any, str], int | None]:
    def check(value: Any, name: str) -> int | None:
        if value is None:
            return None
        try:
            number = int(value)
        except (TypeError, ValueError):
            number = minimum - 1
        if number < minimum or (isinstance(value, float) and value != number):
            raise UsageError(f"{name}: {value!r} is not a whole number of at least {minimum}")
        return number

    METAVARS[check] = "N"
    return check


def _strings(value: Any, name: str) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _libraries(value: Any, name: str) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [] if value == "none" else value.replace(",", " ").split()
    check = _choice("cupy", "torch", "numba")
    return tuple(dict.fromkeys(check(library, name) for library in value or ()))


def _switch(value: Any, name: str) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise UsageError(f"{name}: {value!r} is not one of True, False, None")


def _plain(value: Any, name: str) -> Any:
    return value


def _field(default: Any, text: str, parse: Callable[[Any, str], Any] = _plain, **more: Any) -> Any:
    return field(default=default, metadata={"help": text, "parse": parse, **more})


def _documented(cls: Any) -> Any:
    """Add the fields to the docstring, in the words that the command line has for them."""
    lines = ["", "    Parameters", "    ----------"]
    for item in dataclasses.fields(cls):
        lines.append(f"    {item.name} : {str(item.type).replace('Literal', '')}")
        lines += [f"        {line}" for line in textwrap.wrap(item.metadata["help"], 88)]
    before, raises, after = cls.__doc__.partition("\n    Raises\n")
    cls.__doc__ = before.rstrip() + "\n" + "\n".join(lines) + "\n" + raises + after
    return cls


@_documented
@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is: its device, its memory, its threads, its network.

    Every field is also an option of ``python -m hpcdask.run`` (``memory_limit`` is
    ``--memory-limit``). Values may be given as text; they are parsed here, once.

    Raises
    ------
    UsageError
        A value is not understood; the message names the accepted forms.
    """

    device: Device = _field(
        "auto",
        "What workers compute on. auto: GPUs where there are any.",
        _choice("auto", "cuda", "cpu"),
    )
    protocol: Protocol = _field(
        "auto",
        "How workers exchange data: tcp (TLS), or ucx (NVLink, InfiniBand). auto: ucx where GPUs "
        "have NVLink or InfiniBand between them, else tcp.",
        _choice("auto", "tcp", "ucx"),
    )
    interface: str | None = _field(
        None,
        "Network interface to listen on, such as ib0; auto: the fastest that all nodes have. "
        "Default: the one with the default route.",
    )
    nthreads: int | None = _field(
        None,
        "Threads per worker. Default: 1 with a GPU, else the cores shared among the workers.",
        _count(1),
    )
    memory_limit: int | None = _field(
        None,
        "Host memory per worker, such as 64GiB. Default: what the job may use on the node, "
        "shared among its workers.",
        _parse_memory_limit,
    )
    enable_nvlink: bool | None = _field(
        None, "Have ucx use NVLink, or not. Default: as UCX chooses.", _switch, flag=True
    )
    enable_infiniband: bool | None = _field(
        None, "Have ucx use InfiniBand, or not. Default: as UCX chooses.", _switch, flag=True
    )
    enable_rdmacm: bool | None = _field(
        None, "Have ucx connect by RDMA, or not. Default: as UCX chooses.", _switch, flag=True
    )
    enable_tcp_over_ucx: bool | None = _field(
        None, "Have ucx use tcp beside the others, or not. Default: yes.", _switch, flag=True
    )
    rmm_pool_size: int | float | None = _field(
        None,
        "Device memory to set aside at start as an RMM pool that grows, such as 100GiB or 0.8; "
        "0 for no pool. Default: half of the worker's device.",
        parse_device_memory,
    )
    rmm_async: bool = _field(
        False, "Use RMM's asynchronous allocator instead of the pool (with tcp only).", flag=True
    )
    rmm_allocator_external_lib_list: tuple[str, ...] = _field(
        ("cupy",),
        "Libraries that allocate through RMM: cupy (which a pool wants), torch, numba; or none.",
        _libraries,
        metavar="LIST",
    )
    device_memory_limit: int | float | None = _field(
        None,
        "Spill to host memory above this much device memory, such as 100GiB or 0.8; 0 for never. "
        "Default: 0.8.",
        parse_device_memory,
    )
    local_directory: str | None = _field(
        None,
        "Node-local folder for spilled data and scratch; variables in it are the node's. "
        "Default: temporary-directory of Dask's configuration, else $TMPDIR.",
    )
    name: str | None = _field(None, "Prefix of the workers' names. Default: the host's name.")
    resources: dict[str, float] | None = _field(
        None, 'Abstract resources of each worker, such as "GPU=1 MEM=10e9".', parse_resources
    )
    preload: tuple[str, ...] = _field(
        (),
        "Module or file that each worker loads at start (may be repeated).",
        _strings,
        multiple=True,
    )
    preload_nanny: tuple[str, ...] = _field(
        (),
        "Module or file that each nanny loads at start (may be repeated).",
        _strings,
        multiple=True,
    )
    lifetime: float | None = _field(
        None, "Close each worker after this time, such as 50min.", parse_seconds
    )
    lifetime_stagger: float | None = _field(
        None, "Spread the lifetimes by up to this time.", parse_seconds
    )
    lifetime_restart: bool = _field(
        False, "Start a worker again when its lifetime is over.", flag=True
    )
    death_timeout: float | None = _field(
        60.0, "A worker that finds no scheduler for this long ends.", parse_seconds
    )

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = spec.metadata["parse"](getattr(self, spec.name), option_name(spec.name))
            object.__setattr__(self, spec.name, value)

    @classmethod
    def from_keywords(cls, given: Mapping[str, Any]) -> Self:
        """As the class itself, whose errors name options, for who writes keywords."""
        try:
            return cls(**given)
        except UsageError as error:
            option, colon, rest = str(error).partition(":")
            name = option.removeprefix("--").replace("-", "_")
            if not colon or name not in given:
                raise
            raise UsageError(f"{name}:{rest}") from None

    def to_argv(self) -> list[str]:
        """The options that give this spec again, as an argv list.

        `from_argv` is the way back.
        """
        return to_argv(self)

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> WorkerSpec:
        """Read what `to_argv` wrote."""
        import click

        command = click.Command("worker", params=options(cls))
        with command.make_context("worker", list(argv)) as context:
            return cls(**context.params)


def option_name(name: str) -> str:
    """``memory_limit`` -> ``--memory-limit``."""
    return "--" + name.replace("_", "-")


def negative(option: str) -> str:
    """``--tls`` -> ``--no-tls``; ``--enable-nvlink`` -> ``--disable-nvlink``."""
    if option.startswith("--enable-"):
        return option.replace("--enable-", "--disable-", 1)
    return option.replace("--", "--no-", 1)


def to_argv(spec: Any) -> list[str]:
    """Options that reproduce a spec's values where they differ from the defaults."""
    argv: list[str] = []
    for item in dataclasses.fields(spec):
        value = getattr(spec, item.name)
        if value == item.default:
            continue
        option = option_name(item.name)
        if item.metadata.get("flag"):
            argv.append(option if value else negative(option))
        elif item.metadata.get("multiple"):
            for one in value:
                argv += [option, one]
        elif isinstance(value, tuple):
            argv += [option, ",".join(value) or "none"]
        elif isinstance(value, dict):
            argv += [option, " ".join(f"{key}={number!r}" for key, number in value.items())]
        else:
            argv += [option, "none" if value is None else str(value)]
    return argv


def options(cls: Any) -> list[Any]:
    """The click options of a spec's fields, in their order."""
    import click

    result = []
    for item in dataclasses.fields(cls):
        option = option_name(item.name)
        if item.metadata.get("flag"):
            declaration = f"{option}/{negative(option)}"
            result.append(
                click.Option([declaration], default=item.default, help=item.metadata["help"])
            )
        elif item.metadata.get("multiple"):
            result.append(click.Option([option], multiple=True, help=item.metadata["help"]))
        else:
            default: Any = item.default
            if isinstance(default, tuple):
                default = ",".join(default)
            shown: bool | str = default not in (None, "")
            if item.metadata["parse"] in (parse_seconds, parse_deadline) and shown:
                shown = f"{default:g} s"
            result.append(
                click.Option(
                    [option],
                    default=default,
                    type=str,
                    show_default=shown,
                    help=item.metadata["help"],
                    metavar=item.metadata.get("metavar") or METAVARS.get(item.metadata["parse"]),
                )
            )
    return result


@_documented
@dataclass(frozen=True)
class RunSpec(WorkerSpec):
    """A `WorkerSpec` and what the runner needs beside it."""

    layout: Layout = _field(
        "shared",
        "shared: every rank has a worker, rank 0's node also the scheduler and the "
        "program. dedicated: rank 0 is the scheduler, rank 1 the program, as in dask-mpi.",
        _choice("shared", "dedicated"),
    )
    scheduler_file: str | None = _field(
        None, "File to write the cluster's address to, for hpcdask.connect(FILE) elsewhere."
    )
    dashboard_address: str | None = _field(
        None,
        "Where the dashboard listens, such as :8787. Default: port 8787, or any free one; in a job "
        "everywhere, elsewhere on 127.0.0.1.",
    )
    tls: bool = _field(True, "Encrypt and authenticate all tcp connections.", flag=True)
    oversubscribe: bool = _field(
        False, "Allow more ranks on a node than it has devices.", flag=True
    )
    timeout: float = _field(
        300.0, "Give up when the cluster is not complete after this time.", parse_deadline
    )
    workers_min: int | None = _field(
        None,
        "Start the program when this many workers are there, and go on while they are. "
        "Default: all, and the loss of a rank ends the run.",
        _count(1),
    )
