"""Help texts of click in groups, with defaults as a reader writes them."""

from __future__ import annotations

from typing import Any

import click

#: The group of an option that names none.
OTHER = "Other"
USUAL = "Usual options"
GROUPS = (USUAL, "Workers", "Memory", "Network", "Start", OTHER)
#: Characters of an option in the column beside its text; one that is longer has its own line.
WIDEST = 30

#: The option of commands on clusters that says where they are.
folder_option = click.option(
    "--folder",
    "base",
    metavar="BASE",
    help="Folder with the clusters' folders. Default: HPCDASK_HOME, or ~/.hpcdask.",
)


#: What shows the options that are not usual, too.
ALL = "--help-all"


class Option(click.Option):
    """Option with a group for the help text; `usual` ones come first."""

    def __init__(self, *args: Any, group: str = OTHER, usual: bool = False, **more: Any) -> None:
        super().__init__(*args, **more)
        self.group, self.usual = group, usual

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return click's text, but a default given as text stands without parentheses."""
        extra = super().get_help_extra(ctx)
        if isinstance(self.show_default, str) and "default" in extra:
            extra["default"] = self.show_default
        return extra


class GroupedCommand(click.Command):
    """Command whose help text has the usual options, or with ``--help-all`` groups of all."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Add ``--help-all`` to the parameters."""
        found = super().get_params(ctx)
        return [*found[:-1], self._help_all(), *found[-1:]] if self._has_usual() else found

    def _has_usual(self) -> bool:
        return any(getattr(param, "usual", False) for param in self.params)

    def _help_all(self) -> click.Option:
        def show(ctx: click.Context, param: click.Parameter, value: bool) -> None:
            if value and not ctx.resilient_parsing:
                ctx.meta[ALL] = True
                click.echo(ctx.get_help())
                ctx.exit()

        text = "Show all options and exit."
        return click.Option(
            [ALL], is_flag=True, is_eager=True, expose_value=False, callback=show, help=text
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups that have options."""
        few = self._has_usual() and ALL not in ctx.meta
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                group = getattr(param, "group", OTHER)
                if few and (group != OTHER or getattr(param, "usual", None) is False):
                    group = USUAL if getattr(param, "usual", False) else ""
                groups.setdefault(group, []).append(record)
        groups.pop("", None)
        for title in sorted(groups, key=GROUPS.index):
            widest = min(WIDEST, max(len(option) for option, _ in groups[title]))
            with formatter.section(title):  # the texts of all groups stand below each other
                formatter.write_dl(groups[title], WIDEST, col_spacing=2 + WIDEST - widest)
