"""Traces of one engine in many versions: those of data/ under other headers."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
from crc32c import crc32c

from ...support.places import DATA

GOOD, BAD, OTHER_BAD, WRONG_INPUT = "clean_llama", "table_swap", "kv_flip", "token_swap"


def saved(source: str, target: Path, version: str) -> Path:
    """Copy a trace of data/ with another engine version in its header."""
    with pa.memory_map(str(DATA / f"{source}.arrow")) as file:
        trace = pa.ipc.open_file(file)
        header = json.loads(trace.schema.metadata[b"kvcanary.header"])
        header["engine"]["version"] = version
        text = json.dumps(header).encode()
        told = {b"kvcanary.header": text, b"kvcanary.header_crc32c": str(crc32c(text)).encode()}
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_file(str(target), trace.schema.with_metadata(told), options=options) as writer:
            for number in range(trace.num_record_batches):
                batch, metadata = trace.get_batch_with_custom_metadata(number)
                writer.write_batch(batch, custom_metadata=metadata)
    return target


def torn(source: str, target: Path, version: str) -> Path:
    """The same, cut short."""
    whole = saved(source, target.with_suffix(".whole"), version)
    data = whole.read_bytes()
    target.write_bytes(data[: len(data) // 2])
    whole.unlink()
    return target


def history(folder: Path, kinds: str) -> list[Path]:
    """Write versions 1.0, 1.1, ... by the letters of `kinds`: g good, b bad, o and i bad otherwise, t torn."""
    sources = {"g": GOOD, "b": BAD, "o": OTHER_BAD, "i": WRONG_INPUT, "t": GOOD}
    made = []
    for number, kind in enumerate(kinds):
        make = torn if kind == "t" else saved
        made.append(make(sources[kind], folder / f"run{number}.arrow", f"1.{number}"))
    return made


def keep(trace: Path, target: Path) -> Path:
    """Copy a file."""
    shutil.copy(trace, target)
    return target
