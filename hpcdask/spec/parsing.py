"""Values of options and keywords, from text or as they are. Errors name the accepted forms."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from hpcdask.errors import UsageError

#: Function of a value and the name of its option or keyword. What it returns, it takes, too.
Parser = Callable[[Any, str], Any]
#: Forms of a time.
Time = str | float | timedelta
#: ``2-12:30:00`` and ``1h30m``.
CLOCKS = r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", r"()(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?"


def parse_memory(value: str | float | None, name: str) -> int | None:
    """Return bytes from ``"64GiB"``, ``"64e9"`` or a number; None from None and ``auto``."""
    if value in (None, "auto"):
        return None
    nbytes = _nbytes(value, name, "0 (no limit), auto")
    if 0 < nbytes < 64 << 20:
        raise UsageError(
            f"{name}: {value!r} is {nbytes:,} bytes, less than an idle worker has, so it would be "
            f"restarted for ever. Is a unit missing, as in 64GiB?"
        )
    return nbytes


def parse_device_memory(value: str | float | None, name: str) -> int | float | None:
    """Return bytes, 0, or a fraction of the worker's own device from ``0.8`` or ``80%``.

    None and ``auto`` give None.
    """
    if value in (None, "auto", "none"):
        return 0 if value == "none" else None
    text = str(value).strip()
    with contextlib.suppress(ValueError):
        number = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        if 0 < number <= 1:
            return number
    return _nbytes(value, name, "a fraction of the device such as 0.8 or 80%, 0, auto")


def _nbytes(value: Any, name: str, more: str) -> int:
    """Return bytes. Raises UsageError for anything else; its text has `more` accepted forms."""
    nbytes, text = -1, str(value)
    if text.isdecimal():
        return int(text)
    from dask.utils import parse_bytes  # which takes 0.1 s to import

    fraction = re.fullmatch(r"\s*\d*\.\d*[1-9]\d*\s*", text)  # would be 0 bytes: no limit
    if re.search(r"\d", text) and not fraction:  # parse_bytes takes "GiB" and "" for one
        with contextlib.suppress(ValueError, TypeError, AttributeError, OverflowError):
            nbytes = int(parse_bytes(value))
    if nbytes < 0 or (nbytes == 0 and re.search("[1-9]", text)):
        raise UsageError(
            f"{name}: {value!r} is not an amount of memory. Accepted: 64GiB, 64GB, 512MiB, 8e9, a "
            f"number of bytes, {more}"
        )
    return nbytes


def parse_seconds(value: Time | None, name: str) -> float | None:
    """Return seconds from ``"90s"``, ``"2 min"``, ``"1h30m"``, ``"00:30:00"`` or a number."""
    if value is None or value == "none":
        return None
    seconds = 0.0
    with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
        seconds = value.total_seconds() if isinstance(value, timedelta) else _seconds(value)
    if 0 < seconds < math.inf:
        return seconds
    raise UsageError(
        f"{name}: {value!r} is not a time. "
        f"Accepted: 90s, 5min, 1h30m, 2 hours, 00:30:00, a number of seconds"
    )


def _seconds(value: str | float) -> float:
    with contextlib.suppress(ValueError):
        return float(value)
    text = str(value).strip()
    for form in CLOCKS:
        if match := re.fullmatch(form, text):
            days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
            return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if not re.search(r"\d", text):
        return 0.0  # parse_timedelta takes "s" for 1
    from dask.utils import parse_timedelta

    return float(parse_timedelta(re.sub(r"mins?$", "minutes", text)))


def parse_deadline(value: Time | None, name: str) -> float:
    """Return seconds as `parse_seconds` does, of what must have a limit."""
    if (seconds := parse_seconds(value, name)) is None:
        raise UsageError(f"{name}: it must be a time, such as 5min: nothing waits for ever")
    return seconds


def parse_count(value: str | float | None, name: str) -> int | None:
    """Return a whole number of at least 1."""
    return None if value is None else whole_number(value, name, 1)


def whole_number(value: str | float, name: str, least: int) -> int:
    """Return a number, also from text and from 2.0."""
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        if (number := int(value)) == float(value) and number >= least:
            return number
    raise UsageError(f"{name}: {value!r} is not a whole number of at least {least}")


def parse_resources(value: str | Mapping[str, float] | None, name: str) -> dict[str, float] | None:
    """Return a worker's resources from ``"GPU=2 MEM=10e9"`` or ``"GPU=2,MEM=10e9"``."""
    if value is None:
        return None
    text = value
    if isinstance(value, Mapping):
        text = " ".join(f"{key}={number}" for key, number in value.items())
    pairs = [word.partition("=") for word in _words(text)]
    with contextlib.suppress(ValueError):
        found = {key: float(number) for key, _, number in pairs}
        if all(found) and all(0 <= number < math.inf for number in found.values()):
            return found
    raise UsageError(
        f"{name}: {value!r} is not a list of resources. Accepted: GPU=2, or several: GPU=2 MEM=10e9"
    )


def parse_port_range(value: str | None, name: str) -> str | None:
    """Return ``"20000-20999"``, also from ``"20000:20999"``."""
    if value is None:
        return None
    match = re.fullmatch(r"\s*([0-9]{1,5})\s*[-:]\s*([0-9]{1,5})\s*", str(value))
    if match is None or not 1024 <= int(match[1]) <= int(match[2]) <= 65535:
        raise UsageError(
            f"{name}: {value!r} is not a range of ports. Accepted: 20000-20999, 20000:20999, with "
            f"ports from 1024 to 65535"
        )
    return f"{int(match[1])}-{int(match[2])}"


def configured_port_range() -> str | None:
    """Return ``hpcdask.port-range`` of Dask's configuration, which mostly is not there."""
    import dask.config

    return parse_port_range(dask.config.get("hpcdask.port-range", None), "hpcdask.port-range")


def parse_groups(
    value: str | Mapping[str, int] | tuple[str, ...] | None, name: str
) -> tuple[str, ...]:
    """Return groups as ``("gpu:4", "cpu:2")`` or ``("auto",)``, from ``"gpu:4 cpu:2"``."""
    found = _words(value)
    if isinstance(value, Mapping):
        found = tuple(f"{kind}:{count}" for kind, count in value.items())
    known = all(re.fullmatch(r"(gpu|cpu):[1-9]\d{0,3}", one) for one in found)
    kinds = {one.partition(":")[0] for one in found}
    if found != ("auto",) and not (known and len(kinds) == len(found)):
        raise UsageError(
            f"{name}: {value!r} does not say what the ranks of a node compute on. "
            f'Accepted: "gpu:4 cpu:2", auto, as a keyword also {{"gpu": 4, "cpu": 2}}'
        )
    return found


def parse_libraries(value: str | Iterable[str] | None, name: str) -> tuple[str, ...]:
    """Return names of libraries, each once, from ``"cupy,torch"``."""
    words, known = () if value == "none" else _words(value), ("cupy", "torch", "numba")
    return tuple(dict.fromkeys(parse_choice(word, name, known) for word in words))


def _words(value: str | Iterable[str] | None) -> tuple[str, ...]:
    return tuple(value.replace(",", " ").split() if isinstance(value, str) else value or ())


def parse_strings(value: str | Iterable[str] | None, name: str) -> tuple[str, ...]:
    """Return texts, also from a single one."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def parse_switch(value: Any, name: str) -> bool | None:
    """Return True, False or None."""
    if value is None or isinstance(value, bool):
        return value
    raise UsageError(f"{name}: {value!r} is not one of True, False, None")


def parse_choice(value: Any, name: str, choices: Sequence[str]) -> Any:
    """Return one of these values."""
    if value not in choices:
        raise UsageError(f"{name}: {value!r} is not one of {', '.join(choices)}")
    return value


#: What stands for a value in the command's help.
METAVARS: dict[Parser, str] = {
    parse_count: "N",
    parse_device_memory: "SIZE",
    parse_memory: "SIZE",
    parse_seconds: "TIME",
    parse_deadline: "TIME",
    parse_port_range: "FIRST-LAST",
    parse_groups: "LIST",
    parse_libraries: "LIST",
    parse_strings: "MODULE",
    parse_resources: "LIST",
}
