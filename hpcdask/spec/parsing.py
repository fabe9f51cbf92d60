"""Sizes, times, ports and resources from text."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hpcdask.errors import UsageError

#: Bytes; an idle worker has some more.
LEAST_MEMORY_LIMIT = 64 << 20
#: Forms of an amount of memory.
FORMS = "Accepted: 64GiB, 64GB, 512MiB, 8e9, a number of bytes"
#: Ports that a user may listen on.
LEAST_PORT, MOST_PORT = 1024, 65535


def parse_memory(text: str | int | float | None, name: str) -> int | None:
    """Return bytes from ``"64GiB"``, ``"64e9"`` or a number; None from None and ``auto``.

    Raises UsageError if the text is none of these; the message lists the accepted forms.
    """
    if text is None or text == "auto":
        return None
    try:
        return _nbytes(text)
    except ValueError:
        raise UsageError(
            f"{name}: {text!r} is not an amount of memory. {FORMS}, 0 (no limit), auto"
        ) from None


def parse_device_memory(text: str | int | float | None, name: str) -> int | float | None:
    """Return bytes, 0, or a fraction of the worker's own device from ``0.8`` or ``80%``.

    None and ``auto`` give None.
    """
    if text in (None, "auto", "none"):
        return 0 if text == "none" else None
    number = 0.0
    percent = isinstance(text, str) and re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    with contextlib.suppress(ValueError, TypeError):
        number = float(percent[1]) / 100 if percent else float(text)
    if 0 < number <= 1:
        return number
    try:
        if percent or number % 1:  # more than the device, and no number of bytes
            raise ValueError(text)
        return _nbytes(text)
    except ValueError:
        raise UsageError(
            f"{name}: {text!r} is not an amount of memory. {FORMS}, a fraction of the device such "
            f"as 0.8 or 80%, 0, auto"
        ) from None


def _nbytes(text: Any) -> int:
    """Return bytes. Raises ValueError for anything else."""
    if isinstance(text, str) and not re.search(r"\d", text):
        raise ValueError(text)  # parse_bytes takes "GiB" and "" for one
    from dask.utils import parse_bytes  # which takes 0.1 s to import

    try:
        value = int(parse_bytes(text))
    except (TypeError, AttributeError, OverflowError):
        raise ValueError(text) from None
    # A fraction, which other tools take, would be 0: no limit.
    if value < 0 or (value == 0 and re.search("[1-9]", str(text))):
        raise ValueError(text)
    return value


def _parse_memory_limit(text: str | float | None, name: str) -> int | None:
    value = parse_memory(text, name)
    if value is not None and 0 < value < LEAST_MEMORY_LIMIT:
        raise UsageError(
            f"{name}: {text!r} is {value:,} bytes, less than an idle worker has, so it would be "
            f"restarted for ever. Is a unit missing, as in 64GiB?"
        )
    return value


def parse_seconds(text: str | float | None, name: str) -> float | None:
    """Return seconds from ``"90s"``, ``"2 min"``, ``"1h30m"``, ``"00:30:00"`` or a number."""
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


def parse_deadline(text: str | float, name: str) -> float:
    """Return seconds as `parse_seconds` does, of what must have a limit."""
    if (value := parse_seconds(text, name)) is None:
        raise UsageError(f"{name}: it must be a time, such as 5min: nothing waits for ever")
    return value


def _seconds(text: str) -> float:
    if match := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    with contextlib.suppress(ValueError):
        return float(text)
    if not re.search(r"\d", text):
        raise ValueError(text)  # parse_timedelta takes "" for 1
    if match := re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text):
        hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float((hours * 60 + minutes) * 60 + seconds)
    from dask.utils import parse_timedelta

    return float(parse_timedelta(re.sub(r"mins?$", "minutes", text)))


def parse_resources(text: str | Mapping[str, float] | None, name: str) -> dict[str, float] | None:
    """Return a worker's resources from ``"GPU=2 MEM=10e9"`` or ``"GPU=2,MEM=10e9"``."""
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


UNREAD = "configured"


def parse_port_range(text: str | None, name: str) -> str | None:
    """Return ``"20000-20999"``, also from ``"20000:20999"``.

    None stands for ``hpcdask.port-range`` of Dask's configuration, which mostly is not there, and
    `UNREAD` for None in a process that does not import Dask.
    """
    if text == UNREAD:
        return UNREAD
    if text is None:
        import dask.config

        text, name = dask.config.get("hpcdask.port-range", None), "hpcdask.port-range"
        if text is None:
            return None
    match = re.fullmatch(r"\s*([0-9]{1,5})\s*[-:]\s*([0-9]{1,5})\s*", str(text))
    if match is None or not LEAST_PORT <= int(match[1]) <= int(match[2]) <= MOST_PORT:
        raise UsageError(
            f"{name}: {text!r} is not a range of ports. Accepted: 20000-20999, 20000:20999, with "
            f"ports from {LEAST_PORT} to {MOST_PORT}"
        )
    return f"{int(match[1])}-{int(match[2])}"


def parse_groups(
    value: str | Mapping[str, int] | tuple[str, ...] | None, name: str
) -> tuple[str, ...]:
    """Return groups as ``("gpu:4", "cpu:2")`` or ``("auto",)``, from ``"gpu:4 cpu:2"``."""
    words: Iterable[str] = value or ()
    if isinstance(value, Mapping):
        words = [f"{kind}:{count}" for kind, count in value.items()]
    elif isinstance(value, str):
        words = value.replace(",", " ").split()
    found = tuple(words)
    known = all(re.fullmatch(r"(gpu|cpu):[1-9]\d{0,3}", one) for one in found)
    kinds = {one.partition(":")[0] for one in found}
    if found != ("auto",) and not (known and len(kinds) == len(found)):
        raise UsageError(
            f"{name}: {value!r} does not say what the ranks of a node compute on. "
            f'Accepted: "gpu:4 cpu:2", auto, as a keyword also {{"gpu": 4, "cpu": 2}}'
        )
    return found


#: What stands for a value in the command's help.
METAVARS: dict[Callable[[Any, str], Any], str] = {
    parse_device_memory: "SIZE",
    _parse_memory_limit: "SIZE",
    parse_seconds: "TIME",
    parse_deadline: "TIME",
    parse_port_range: "FIRST-LAST",
    parse_groups: "LIST",
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


def _strings(value: str | Iterable[str] | None, name: str) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _libraries(value: str | Iterable[str] | None, name: str) -> tuple[str, ...]:
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
