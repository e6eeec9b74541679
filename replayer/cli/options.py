"""What the options of replaying commands take, and what is wrong with what was given."""

import sys
from pathlib import Path

import click

from ...recorder.cli.program import console_for


def list_checks(context: click.Context) -> None:
    """Print every check with what it finds, and end the command."""
    from rich.table import Table

    from ..checks import CHECKS

    table = Table.grid(padding=(0, 2))
    for name, check in CHECKS.items():
        table.add_row(name, check.finds)
    console_for(sys.stdout).print(table)
    context.exit()


def check_names(text: str) -> tuple[str, ...]:
    """Return the checks that `text` asks for: all, none, or names joined by commas, of which -name leaves one out."""
    from ..checks import CHECK_NAMES

    if text in ("all", "none"):
        return CHECK_NAMES if text == "all" else ()
    asked = [name.strip() for name in text.split(",")]
    unknown = [name for name in asked if name.removeprefix("-") not in CHECK_NAMES]
    if unknown:
        raise click.UsageError(
            f"--checks: no check {unknown[0].removeprefix('-')!r}; there are {', '.join(CHECK_NAMES)}, all, none"
        )
    chosen = {name for name in asked if not name.startswith("-")} or set(CHECK_NAMES)
    return tuple(name for name in CHECK_NAMES if name in chosen and f"-{name}" not in asked)


def oracle_name(text: str) -> str:
    """Return the name of one's own oracle, which is tried out."""
    from ...kernels.ops.oracle.own import load_oracle

    try:
        if text:
            load_oracle(text, 1 << 16)
    except ValueError as error:
        raise click.UsageError(f"--oracle: {error}") from None
    return text


def model_folder(text: str) -> str:
    """Return the folder of a checkpoint, if it is one and what loads it is there."""
    from importlib.util import find_spec

    if not text:
        return ""
    if not (Path(text) / "config.json").is_file():
        raise click.UsageError(f"--model: {text} is no folder with a config.json; name a checkpoint on this machine")
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise click.UsageError(f"--model needs {' and '.join(missing)}: pip install 'kvcanary[model]'")
    return str(Path(text).absolute())


def executor_for(device: str, executor: str) -> str:
    """Return the executor that runs on a device; a GPU steps."""
    source = click.get_current_context().get_parameter_source("executor")
    if device == "cpu" or executor == "stepwise":
        return executor
    if source is not click.core.ParameterSource.DEFAULT:
        raise click.UsageError(f"--executor {executor} runs on the CPU; leave it out, or replay with --device cpu")
    return "stepwise"


def device_names(text: str | None, single: click.Parameter | None = None) -> tuple[str, ...]:
    """Return the devices named, joined by commas, or the one that the option `single` takes; none of None."""
    if text is None:
        return ()
    from ..executors.device.cuda import is_device_name

    names = tuple(name.strip() for name in text.split(",")) if single is None else (text,)
    for name in names:
        if not is_device_name(name):
            expected = f"{name!r} is no device; expected cpu, cuda or cuda:N"
            if single is not None:
                raise click.BadParameter(expected, param=single)
            raise click.UsageError(f"--devices: {expected}, joined by commas")
    return names
