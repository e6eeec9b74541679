"""`kvcanary ship`: finished traces and reports to an object store."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import printable
from ..process.settings import Setting
from ..remote import RemotePath
from .program import GivenPath, console_for, fail

if TYPE_CHECKING:
    from ..writing.shipping import Shipment

_EPILOG = """\b
Examples:
  kvcanary ship /traces s3://bucket/prefix/$HOSTNAME
      beside the engine, until Ctrl-C or SIGTERM: segments go as soon as they are finished
  kvcanary ship --once --keep /traces s3://bucket/prefix
      copy what is finished now, and leave it here
  kvcanary ship --leave 4 --limit 50MiB /traces gs://bucket/prefix
      a flight recorder of four segments; at most 50 MiB a second
  kvcanary ship --once trace.report s3://bucket/reports/trace.report
  kvcanary-replay s3://bucket/prefix/$HOSTNAME

\b
Exit codes: 0 all that is finished was shipped, 2 something could not be (it is named, and stays here).
"""


@click.command("ship", epilog=_EPILOG)
@click.argument("folder", type=GivenPath(exists=True, file_okay=False))
@click.argument("target", metavar="URL", type=GivenPath(url=True))
@click.option("--once", is_flag=True, help="Ship what is finished now, and end.")
@click.option(
    "--every",
    type=click.FloatRange(min=0.1),
    default=5.0,
    show_default=True,
    help="How often to look for finished files, in seconds.",
)
@click.option("--keep", is_flag=True, help="Delete nothing.")
@click.option(
    "--leave",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Finished segments of a recording under way that stay here, for a freeze: as many as KVCANARY_KEEP_SEGMENTS.",
)
@click.option("--limit", metavar="BYTES", default="0", help="Bytes a second, as 50MiB; 0: no limit. [default: 0]")
@click.option("--json", "as_json", is_flag=True, help="Print what was shipped as JSON, at the end.")
def ship_command(
    folder: Path, target: Path, once: bool, every: float, keep: bool, leave: int, limit: str, as_json: bool
) -> None:
    """Move finished traces of FOLDER to an object store, beside the engine that records them.

    A trace goes up whole, is read back, and is deleted here once its checksum is right: segments of a recording under way but the
    newest, all files of one that is over. Frozen folders and reports are copied. What is cut short is done again.
    """
    from ..writing.shipping import Shipment

    if not isinstance(target, RemotePath):
        fail(f"{target}: expected the URL of an object store, as s3://bucket/prefix; `mv` moves files to a folder")
    try:
        rate = Setting("limit", "bytes", "").parse(limit, "--limit")
    except ValueError as error:
        fail(str(error))
    err = console_for(sys.stderr)
    shipment = Shipment(folder=folder, target=target, leave=leave, keep=keep, bytes_per_second=rate)
    with err.status("") as status:
        shipment.on_bytes = lambda path, done, size: status.update(
            printable(f"{path.name}   {done / 1e6:,.1f} of {size / 1e6:,.1f} MB")
        )
        try:
            while True:
                known = (len(shipment.shipped), dict(shipment.failed))
                shipment.run()
                if not as_json:
                    _say_news(shipment, *known)
                if once:
                    break
                status.update(f"waiting for segments   {shipment.shipped_bytes / 1e6:,.1f} MB shipped")
                time.sleep(every)
        except KeyboardInterrupt:
            if once:
                raise
    _end(shipment, as_json=as_json)


def _say_news(shipment: "Shipment", before: int, failed: dict[str, str]) -> None:
    for name in shipment.shipped[before:]:
        click.echo(printable(f"shipped {name}"))
    for path, reason in shipment.failed.items():
        if failed.get(path) != reason:
            click.echo(printable(f"failed  {path}: {reason}"), err=True)


def _end(shipment: "Shipment", *, as_json: bool) -> None:
    if as_json:
        counted = {"bytes": shipment.shipped_bytes, "deleted": shipment.deleted, "failed": shipment.failed}
        click.echo(json.dumps({"target": str(shipment.target), "shipped": shipment.shipped, **counted}, indent=2))
    else:
        text = f"total   {len(shipment.shipped):,} files, {shipment.shipped_bytes / 1e6:,.1f} MB shipped"
        click.echo(
            f"{text}; {shipment.deleted:,} deleted here" + f"; {len(shipment.failed)} failed" * bool(shipment.failed)
        )
    sys.exit(2 if shipment.failed else 0)
