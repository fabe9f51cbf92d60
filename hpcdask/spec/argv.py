"""Spec to command line, and click options from fields."""

from __future__ import annotations

import dataclasses
from typing import Any

from .parsing import METAVARS, parse_deadline, parse_seconds


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
