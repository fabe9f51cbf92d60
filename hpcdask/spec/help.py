"""Help texts of click in groups, with defaults as a reader writes them."""

from __future__ import annotations

from typing import Any

import click

#: The group of an option that names none.
OTHER = "Other"
GROUPS = ("Workers", "Memory", "Network", "Start", "Profile", OTHER)
#: Characters of an option in the column beside its text; one that is longer has its own line.
WIDEST = 30


class Option(click.Option):
    """An option with a group for the help text."""

    def __init__(self, *args: Any, group: str = OTHER, **more: Any) -> None:
        super().__init__(*args, **more)
        self.group = group

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return click's text, but a default given as text stands without parentheses."""
        extra = super().get_help_extra(ctx)
        if isinstance(self.show_default, str) and "default" in extra:
            extra["default"] = self.show_default
        return extra


class GroupedCommand(click.Command):
    """A command whose help text has a section for each group of options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups that have options."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                groups.setdefault(getattr(param, "group", OTHER), []).append(record)
        for title in sorted(groups, key=GROUPS.index):
            widest = min(WIDEST, max(len(option) for option, _ in groups[title]))
            with formatter.section(title):  # the texts of all groups stand below each other
                formatter.write_dl(groups[title], WIDEST, col_spacing=2 + WIDEST - widest)
