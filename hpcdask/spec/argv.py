"""Command lines: click options from the fields of a spec, and the values that a user gave."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import click

from hpcdask.errors import UsageError

from .parsing import METAVARS, parse_strings, parse_switch

#: The option of commands on clusters that says where they are.
folder_option = click.option(
    "--folder",
    "base",
    metavar="BASE",
    help="Folder with the clusters' folders. Default: HPCDASK_HOME, or ~/.hpcdask.",
)


def option_name(name: str) -> str:
    """Return the option of a field: ``memory_limit`` is ``--memory-limit``."""
    return "--" + name.replace("_", "-")


def negative(option: str) -> str:
    """Return the opposite option: ``--no-tls``, ``--disable-nvlink``."""
    if option.startswith("--enable-"):
        return option.replace("--enable-", "--disable-", 1)
    return option.replace("--", "--no-", 1)


def options(cls: Any, usual: Collection[str] = ()) -> list[click.Option]:
    """Return the click options of a spec's fields, in their order.

    If some are `usual`, the help text has only them, and ``--help-all`` shows all.
    """
    found = []
    for item in dataclasses.fields(cls):
        option, parse = option_name(item.name), item.metadata["parse"]
        more: dict[str, Any] = {
            "help": item.metadata["help"],
            "metavar": item.metadata["metavar"] or METAVARS.get(parse),
            "multiple": parse is parse_strings,
            "hidden": bool(usual) and item.name not in usual,
        }
        both = f"{option}/{negative(option)}" if parse is parse_switch else option
        found.append(click.Option([both], default=None, **more))

    def show_all(context: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            for option in found:
                option.hidden = False
            click.echo(context.get_help())
            context.exit()

    if usual:
        flags: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
        text = "Show all options and exit."
        found.append(click.Option(["--help-all"], callback=show_all, help=text, **flags))
    return found


def make_command(
    program: str, text: str, params: Sequence[click.Parameter], epilog: str = "", **more: Any
) -> click.Command:
    """Make a command with a help text, for `read`."""
    more |= {"max_content_width": 100, "help_option_names": ["-h", "--help"]}
    return click.Command(program, params=[*params], help=text, epilog=epilog, context_settings=more)


def read(command: click.Command, argv: Sequence[str]) -> dict[str, Any]:
    """Return the values on a command line, but of options that nobody gave.

    Raises UsageError, and SystemExit after ``--help``.
    """
    try:
        with command.make_context(command.name, list(argv)) as context:
            return {name: one for name, one in context.params.items() if one is not None}
    except click.exceptions.Exit as stop:
        raise SystemExit(stop.exit_code) from None
    except click.UsageError as error:
        hint = f" ({command.name} --help lists the options)" if command.help else ""
        raise UsageError(f"{error.format_message()}{hint}") from None
