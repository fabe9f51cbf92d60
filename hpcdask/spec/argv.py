"""Spec to command line, and click options from fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from hpcdask.errors import UsageError

from .parsing import METAVARS, parse_deadline, parse_seconds

if TYPE_CHECKING:
    import click


def option_name(name: str) -> str:
    """Return the option of a field: ``memory_limit`` is ``--memory-limit``."""
    return "--" + name.replace("_", "-")


def negative(option: str) -> str:
    """Return the opposite option: ``--no-tls``, ``--disable-nvlink``."""
    if option.startswith("--enable-"):
        return option.replace("--enable-", "--disable-", 1)
    return option.replace("--", "--no-", 1)


def to_argv(spec: Any) -> list[str]:
    """Return options that reproduce a spec's values where they differ from the defaults."""
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


def make_command(
    program: str, text: str, params: list[Any], epilog: str | None = None, **settings: Any
) -> click.Command:
    """Make a command with a help text, for `read`."""
    from .help import GroupedCommand

    settings |= {"max_content_width": 100, "help_option_names": ["-h", "--help"]}
    return GroupedCommand(
        program, params=params, help=text, epilog=epilog, context_settings=settings
    )


def read(
    command: Any, argv: Sequence[str], advice: Callable[[Any], str] = lambda error: ""
) -> dict[str, Any]:
    """Return the values on a command line.

    Raises UsageError, in which `advice` may explain click's error, and SystemExit after ``--help``.
    """
    import click

    try:
        with command.make_context(command.name, list(argv)) as context:
            return dict(context.params)
    except click.exceptions.Exit as stop:
        raise SystemExit(stop.exit_code) from None
    except click.UsageError as error:
        usual = f"{error.format_message()} ({command.name} --help lists the options)"
        raise UsageError(advice(error) or usual) from None


def options(cls: Any, usual: Collection[str] = ()) -> list[Any]:
    """Return the click options of a spec's fields, in their order; `usual` fields come first."""
    from .help import Option

    result = []
    for item in dataclasses.fields(cls):
        option, about = option_name(item.name), item.metadata
        given: dict[str, Any] = {"help": about["help"], "group": about["group"]}
        given["usual"] = item.name in usual
        if about.get("flag"):
            option, given["default"] = f"{option}/{negative(option)}", item.default
        elif about.get("multiple"):
            given |= {"multiple": True, "metavar": about.get("metavar")}
        else:
            default: Any = (
                ",".join(item.default) if isinstance(item.default, tuple) else item.default
            )
            shown: bool | str = default not in (None, "")
            if about["parse"] in (parse_seconds, parse_deadline) and shown:
                shown = f"{default:g} s"
            metavar = about.get("metavar") or METAVARS.get(about["parse"])
            given |= {"default": default, "type": str, "show_default": shown, "metavar": metavar}
        result.append(Option([option], **given))
    return result
