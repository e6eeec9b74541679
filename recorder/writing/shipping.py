"""Moving what a recorder has finished to an object store, while it goes on recording.

A file goes up under a name that no reader looks at, is read back, and gets its own name if its checksum is right: what has its
name in the store is whole. Only then the local file goes. Whatever ends this in between leaves a part that the next try
replaces. Of a recording under way the newest finished segments stay, since a freeze wants them; frozen folders are nobody's to
delete, and are copied, as reports are.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from crc32c import crc32c

from ..errors import UnreadableTraceError
from ..files import is_regular, regular_file
from ..remote import RemoteFile, RemotePath, located, retried
from ..trace.files import is_being_written, recording_path, segments_of, split_segment_name, tail_paths
from ..trace.reader import TraceReader

_PART_BYTES: Final = 4 << 20
_BEGINNING_S: Final = 10.0  # after which a file that is written has its lock
_SUMMARY: Final = "summary.json"  # last of a report: where it is, the report is whole
_LEFT_HERE: Final = (".duckdb", ".wal", ".partial", ".arrow")  # of a report: made again where it is read


class Finished(NamedTuple):
    """A file that nobody writes to any more, its name below the target, and whether it goes once it is shipped."""

    path: Path
    name: str
    goes: bool


@dataclass(slots=True, kw_only=True)
class Shipment:
    """What was shipped from `folder` to `target`; `failed` holds each file that could not be, with the reason."""

    folder: Path
    target: RemotePath
    leave: int = 1  # finished segments of a recording under way that stay here
    keep: bool = False
    bytes_per_second: int = 0
    on_bytes: Callable[[Path, int, int], None] = lambda *_: None
    shipped: list[str] = field(default_factory=list)
    shipped_bytes: int = 0
    deleted: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    _verified: set[tuple[str, int, int]] = field(default_factory=set)

    def run(self) -> None:
        """Ship all that is finished; nothing is raised but what ends the process."""
        self.failed.clear()
        for one in finished(self.folder, self.leave, self.failed):
            try:
                self._ship(one)
            except OSError as error:
                told = str(error.filename or one.path)
                if isinstance(error, FileNotFoundError) and not one.path.exists():
                    continue  # a flight recorder deleted it meanwhile
                self.failed[str(one.path)] = f"{told}: {error.strerror or error}"
                if told.startswith(str(self.target)) and isinstance(error, FileNotFoundError | PermissionError):
                    return  # no bucket, or no right to write there: so it is with every file

    def _ship(self, one: Finished) -> None:
        found = one.path.stat()
        state = (str(one.path), found.st_size, found.st_mtime_ns)
        if state not in self._verified:
            target = self.target / one.name
            with regular_file(one.path, links=False) as descriptor:
                if not self._is_there(one, target, descriptor, found.st_size):
                    self._send(target, descriptor, found.st_size)
                    self.shipped.append(str(target))
                    self.shipped_bytes += found.st_size
            self._verified.add(state)
        if one.goes and not self.keep:
            now = one.path.stat()
            if (now.st_size, now.st_mtime_ns) == state[1:]:
                one.path.unlink()
                self.deleted += 1

    def _is_there(self, one: Finished, target: RemotePath, descriptor: int, size: int) -> bool:
        """Whether the store has this very file; raise `OSError` if it has another one of its name, but for a report's."""
        try:
            there = target.stat().st_size
        except FileNotFoundError:
            return False
        if there == size and self._checksum(target, size) == _checksum(self._parts(one.path, descriptor, size)):
            return True
        if one.path.suffix == ".arrow":
            raise FileExistsError(
                errno.EEXIST, "another trace of that name is there; ship to a prefix of its own", str(target)
            )
        return False

    def _send(self, target: RemotePath, descriptor: int, size: int) -> None:
        partial = target.with_name(f".{target.name}.part")
        filesystem, key = located(partial)

        def send() -> int:
            with filesystem.open_output_stream(key) as out:
                crc = _checksum(self._parts(target, descriptor, size), out.write)
            if self._checksum(partial, size) != crc:
                raise OSError("what came back from the store differs from what was sent")
            return crc

        crc = retried(target, send)
        try:
            retried(target, lambda: filesystem.move(key, located(target)[1]))
        except OSError:  # one of the tries may have moved it, and its answer was lost
            if self._checksum(target, size) != crc:
                raise
        if target.stat().st_size != size:
            raise OSError(errno.EIO, "the store shows another size than was sent", str(target))

    def _parts(self, path: Path, descriptor: int, size: int) -> Iterator[bytes]:
        """Yield an open file's bytes, at most so many a second."""
        begin, at = time.monotonic(), 0
        while part := os.pread(descriptor, _PART_BYTES, at):
            yield part
            at += len(part)
            self.on_bytes(path, at, size)
            if self.bytes_per_second:
                time.sleep(max(0.0, begin + at / self.bytes_per_second - time.monotonic()))

    def _checksum(self, path: RemotePath, size: int) -> int | None:
        """Return the checksum of what the store holds, None for another size, or if there is nothing."""
        try:
            file = RemoteFile(path, ahead=1)
        except FileNotFoundError:
            return None
        try:
            if file.size != size:
                return None
            buffer, crc = memoryview(bytearray(_PART_BYTES)), 0
            for at in range(0, size, _PART_BYTES):
                crc = crc32c(bytes(buffer[: file.read_into(buffer, at)]), crc)
            return crc
        finally:
            file.close()


def _checksum(parts: Iterator[bytes], use: Callable[[bytes], object] = lambda _: None) -> int:
    crc = 0
    for part in parts:
        use(part)
        crc = crc32c(part, crc)
    return crc


def finished(folder: Path, leave: int, unreadable: dict[str, str]) -> Iterator[Finished]:
    """Yield what nobody writes to any more: traces with their tails before them, frozen folders, reports.

    Where the file system knows no locks, every recording is taken for one under way. Files that are called as traces are, and
    are none, are put into `unreadable`.
    """
    recordings: dict[Path, list[Path]] = {}
    for path in sorted(folder.glob("[!.]*.arrow")):
        if is_regular(path):
            recordings.setdefault(recording_path(path), []).append(path)
    for paths in recordings.values():
        yield from _of_recording(paths, leave, unreadable)
    for inner in sorted(folder.glob("*.frozen-*/")):
        yield from (Finished(path, f"{inner.name}/{path.name}", False) for path in sorted(inner.glob("[!.]*.arrow")))
    for inner in sorted(folder.glob("*.report/")):
        yield from _report(inner, f"{inner.name}/")
    yield from _report(folder, "")


def _of_recording(paths: list[Path], leave: int, unreadable: dict[str, str]) -> Iterator[Finished]:
    complete: dict[Path, bool] = {}
    why: dict[str, str] = {}
    for path in paths:
        try:
            with TraceReader(path) as reader:
                complete[path] = reader.complete
        except UnreadableTraceError as error:
            why[str(path)] = f"not shipped: {error}"
    # Two, since the newest has no lock yet at the moment in which it is begun; and a writer that went on to a new one meanwhile
    # holds no lock on those that were found.
    live = any(
        is_being_written(path, unknown=True) or (_is_new(path) and not complete.get(path)) for path in paths[-2:]
    )
    if live or (split_segment_name(paths[-1]) and segments_of(recording_path(paths[-1])) != paths):
        ended = [path for path, whole in complete.items() if whole and path != paths[-1]]
        for number, path in enumerate(ended):
            yield Finished(path, path.name, number < len(ended) - leave)
        return
    unreadable |= why
    tails = [path for path in tail_paths(paths[0]) if is_regular(path)] if complete else []
    yield from (Finished(path, path.name, False) for path in tails)
    yield from (Finished(path, path.name, True) for path in complete)
    yield from (Finished(path, path.name, True) for path in tails)


def _is_new(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime < _BEGINNING_S
    except OSError:
        return False


def _report(folder: Path, prefix: str) -> Iterator[Finished]:
    names = [path.name for path in folder.glob("[!.]*") if is_regular(path) and not path.name.endswith(_LEFT_HERE)]
    if _SUMMARY in names:
        for name in sorted(names, key=lambda name: (name == _SUMMARY, name)):
            yield Finished(folder / name, f"{prefix}{name}", False)
