"""The history checks as the options of the replay command speak of them."""

import sys

import click


def list_checks(context: click.Context) -> None:
    """Print every check with what it finds, and end the command."""
    from rich.console import Console
    from rich.table import Table

    from ..checks import CHECKS

    table = Table.grid(padding=(0, 2))
    for name, check in CHECKS.items():
        table.add_row(name, check.finds)
    Console(width=None if sys.stdout.isatty() else 160, emoji=False, highlight=False).print(table)
    context.exit()


def check_names(text: str) -> tuple[str, ...]:
    """Return the checks that `text` asks for: all, none, or names joined by commas, of which -name leaves one out.

    Raises:
        click.UsageError: there is no such check.
    """
    from ..checks import CHECK_NAMES

    if text in ("all", "none"):
        return CHECK_NAMES if text == "all" else ()
    asked = [name.strip() for name in text.split(",")]
    unknown = [name for name in asked if name.removeprefix("-") not in CHECK_NAMES]
    if unknown:
        raise click.UsageError(
            f"--checks: no check {unknown[0].removeprefix('-')!r}; there are {', '.join(CHECK_NAMES)}, all, none"
        )
    left_out = {name[1:] for name in asked if name.startswith("-")}
    chosen = {name for name in asked if not name.startswith("-")} or set(CHECK_NAMES)
    return tuple(name for name in CHECK_NAMES if name in chosen - left_out)
