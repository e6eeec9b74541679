"""The type of every path on a command line."""

from pathlib import Path
from typing import Any

import click


class GivenPath(click.Path):
    """A `pathlib.Path` that is not empty: an empty one would stand for the folder one is in."""

    def __init__(self, **options: Any) -> None:
        super().__init__(path_type=Path, **options)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; an empty name ends the command."""
        if value == "":
            self.fail("the name is empty; is a variable of the shell unset?", param, ctx)
        return super().convert(value, param, ctx)
