"""`kvcanary check-adapter`: try an adapter with healthy runs and with faults, and say what it does not show."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...recorder.cli.program import GivenPath, console_for, fail

if TYPE_CHECKING:
    from ..lab.adapter_check import AdapterReport

_EPILOG = """\b
ENGINE is a class or function of yours that gets the trace's path:
  class Engine:
      vocab_size, max_len = 64, 64        what prompts may hold; these if absent
      def __init__(self, trace): ...      your engine, your adapter attached
      def add(self, name, prompt, new_tokens): ...     a request
      def step(self) -> bool: ...         one step; whether anything is left
      def close(self): ...                the end of engine and recorder
\b
For faults, your engine calls self.on_inputs(inputs) in each forward, before
the adapter looks. inputs is a dict with what you have of these, the engine's
own tensors, which are changed in place:
  input_ids positions slots                [T]
  prefix_lens extend_lens seq_lens         [bs]
  block_tables [bs, max_blocks] and block_size, or
  req_to_token [rows, width] and rows [bs]
  K V      a KvTensor each, of the first layer that is recorded
A method fault_NAME(self) -> bool is a fault of yours, in the allocator, say:
it is asked before each step until it returns True.
\b
Examples:
  kvcanary check-adapter my_engine.recording:Engine
  kvcanary check-adapter adapter_test.py:Engine --seeds 8 --keep traces
  kvcanary check-adapter adapter_test.py:Engine --json | jq .missed
\b
Exit code: 0 healthy runs are clean and every fault that was planted was
found; 1 not so; 2 ENGINE cannot be used, or fails in a healthy run; 125
nothing wrong, but no fault could be planted, or a healthy run is inconclusive.
docs/guide/checking-an-adapter.md goes through an example.
"""


@click.command("check-adapter", epilog=_EPILOG)
@click.argument("target", metavar="MODULE:ENGINE")
@click.option("--seeds", type=click.IntRange(1, 1000), default=3, show_default=True, help="Healthy runs.")
@click.option("--keep", type=GivenPath(file_okay=False), help="Folder for the traces, which are thrown away else.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def check_adapter_command(target: str, seeds: int, keep: Path | None, as_json: bool) -> None:
    """Try an adapter of yours: run its engine, healthy and with faults, and replay what it recorded.

    MODULE is a module or a file of Python. Healthy runs must be clean: what is found there is false, and mostly a call that is
    missing. Faults are planted one at a time and must be found. And it says what the adapter does not record, and what is
    not found for that reason. Nothing of yours is changed.
    """
    from ..lab.adapter_check import EngineError, check_adapter

    factory = _factory(target)
    err = console_for(sys.stderr)
    with contextlib.ExitStack() as stack:
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcanary-")))
        status = stack.enter_context(err.status("")) if err.is_terminal else None
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # an engine may print what it likes
        try:
            report = check_adapter(
                factory, folder, seeds=seeds, on_trial=lambda name: status.update(name) if status is not None else None
            )
        except EngineError as error:
            fail(f"{target}: {error}")
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        _show(report, keep)
    sys.exit(report.exit_code)


def _factory(target: str) -> Any:
    """Return what MODULE:ENGINE names."""
    module_name, _, name = target.rpartition(":")
    if not module_name or not name:
        raise click.BadParameter(f"{target!r} is not MODULE:ENGINE", param_hint="MODULE:ENGINE")
    is_file = module_name.endswith(".py")
    if is_file and not Path(module_name).is_file():
        fail(f"{module_name}: no such file; MODULE is a file's path, or the name of a module that can be imported here")
    try:
        sys.path.insert(0, str(Path(module_name).absolute().parent if is_file else Path.cwd()))
        module = importlib.import_module(Path(module_name).stem if is_file else module_name)
    except Exception as error:  # noqa: BLE001  # whatever a module of the user's raises
        from ..lab.adapter_check import way_out

        fail(f"{module_name} cannot be imported: {type(error).__name__}: {error}{way_out(error)}")
    if not callable(getattr(module, name, None)):
        fail(f"{module_name} has no class or function {name}")
    return getattr(module, name)


def _show(report: AdapterReport, keep: Path | None) -> None:
    from rich.table import Column, Table

    out = console_for(sys.stdout)
    runs = len(report.healthy) + len(report.faults)
    out.print(f"{report.engine}   {runs} runs, {sum(t.forwards for t in report.healthy + report.faults):,} forwards")
    out.print()
    table = Table("recorded", "", "what is missing", box=None, pad_edge=False)
    for entry in report.recorded:
        table.add_row(entry.what, entry.recorded, entry.detail)
    out.print(table)
    out.print()
    clean = sum(trial.verdict == "clean" for trial in report.healthy)
    out.print(f"healthy runs   {clean} of {len(report.healthy)} clean")
    for name, count in report.false_findings.items():
        out.print(f"  false        {count:,} {name}", style="red", markup=False)
    for trial in report.healthy:
        for text in (trial.first, *trial.doubts) if trial.verdict != "clean" else ():
            if text:
                out.print(f"  seed {trial.seed}       {text}", markup=False)
    out.print()
    table = Table(Column("fault", overflow="fold"), "found", "after", "by", box=None, pad_edge=False)
    for trial in report.faults:
        later = trial.seen - trial.planted
        late = "" if not trial.found else "at once" if not later else f"{later} forward{'s' if later > 1 else ''}"
        by = ", ".join(trial.found_by) if trial.found else f"not found: {report.why_missed(trial)}"
        table.add_row(trial.fault, "yes" if trial.found else "no", late, by, style="" if trial.found else "red")
    for name, reason in report.not_judged.items():
        table.add_row(name, "-", "", f"not judged: {reason}", style="dim")
    out.print(table)
    out.print()
    missed = f": {', '.join(report.missed)} not found" if report.missed else ""
    false = ": healthy runs are not clean" if report.false_findings else ""
    out.print(f"{report.verdict}{false}{missed}", markup=False)
    if keep is not None:
        out.print(f"next  kvcanary-replay {keep}/NAME.arrow", markup=False)
