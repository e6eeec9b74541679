"""Files in an object store, by their URL: S3, Google's and Azure's through pyarrow, all else through fsspec.

A `RemotePath` is asked as any path is; what goes wrong is an `OSError` whose `strerror` is one line for people. What may pass
(a reset, a 503, a body cut short) is tried again, each time after twice as long. Credentials come from the environment alone.
"""

import contextlib
import errno
import fnmatch
import functools
import os
import re
import stat
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PosixPath
from threading import Lock
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar

from .errors import first_line

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")

WAITS_S: Final = [0.2, 0.5, 1.0, 2.0, 4.0]  # between tries; a list, so that tests need not wait
_CONNECT_S: Final = 10.0
_REQUEST_S: Final = 30.0
_URL: Final = re.compile(r"([a-z][a-z0-9+.-]+)://")
_COLLAPSED: Final = re.compile(r"(s3|gs|gcs|az|abfss?|hf|memory|https?):/")  # what a plain Path makes of a URL
_DENIED: Final = re.compile(r"access.?denied|forbidden|unauthorized|\b40[13]\b|invalid.?access.?key|signature", re.I)
_LONGEST_REASON: Final = 200
_COPIED_BYTES: Final = 4 << 20
_ASKED_AT_ONCE: Final = 16


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return a path, for a URL the `RemotePath`; `file://` is a file of this machine."""
    if isinstance(path, RemotePath):
        return path
    text = os.fspath(path)
    found = _URL.match(text) or _COLLAPSED.match(text)
    if found is None:
        return Path(path)
    return Path(text[len("file://") :]) if found[1] == "file" else RemotePath(text)


def arrow_file(path: Path) -> Any:
    """Open a file for pyarrow to read; raise `OSError`.

    Not as a Python file: pyarrow's threads let go of what they read of one a moment later, which aborts a process that ends
    meanwhile. And by bytes: pyarrow takes no text that is not UTF-8.
    """
    import pyarrow as pa

    return path.open("rb") if isinstance(path, RemotePath) else pa.OSFile(os.fsencode(path))


def beside(path: Path) -> Path:
    """Return the folder for what is made of a file: its own, of a URL the one that this process is in."""
    return Path() if isinstance(path, RemotePath) else path.parent


class RemotePath(PosixPath):
    """A URL with a path's manners, for reading; whatever would write raises `OSError`."""

    def __str__(self) -> str:
        """Return the URL; the path itself holds one slash behind the scheme."""
        scheme, _, rest = super().__str__().partition(":/")
        return f"{scheme}://{rest.lstrip('/')}"

    def __fspath__(self) -> str:
        return str(self)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return size and time of change; raise `FileNotFoundError` for what is not there, `OSError`."""
        import pyarrow.fs

        filesystem, key = located(self)
        found = retried(self, lambda: filesystem.get_file_info(key))
        if found.type == pyarrow.fs.FileType.NotFound:
            raise _absent(self)
        folder = found.type == pyarrow.fs.FileType.Directory
        changed_ns = found.mtime_ns or 0
        seconds = changed_ns / 1e9
        values = (stat.S_IFDIR if folder else stat.S_IFREG, 0, 0, 1, 0, 0, found.size or 0, seconds, seconds, seconds)
        return os.stat_result(values, {"st_mtime": seconds, "st_mtime_ns": changed_ns})

    def lstat(self) -> os.stat_result:
        """Return what `stat` does: a store has no links."""
        return self.stat()

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Whether there is an object of that name, or one below it; raise `OSError` if the store cannot be asked."""
        return self._mode() != 0

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether there are objects below it; raise `OSError`."""
        return stat.S_ISDIR(self._mode())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether there is an object of that name; raise `OSError`."""
        return stat.S_ISREG(self._mode())

    def _mode(self) -> int:
        try:
            return self.stat().st_mode
        except FileNotFoundError:
            return 0

    def iterdir(self) -> Iterator["RemotePath"]:  # type: ignore[override]  # of this class, as a path's own are of its
        """Yield what lies right below; raise `OSError`."""
        import pyarrow.fs

        filesystem, key = located(self)
        selector = pyarrow.fs.FileSelector(key, allow_not_found=True)
        for found in retried(self, lambda: filesystem.get_file_info(selector)):
            yield self / found.base_name

    def glob(self, pattern: str, **_: Any) -> Iterator["RemotePath"]:  # type: ignore[override]  # as above
        """Yield what lies right below and has such a name, or below that by a name of its own; raise `OSError`."""
        first, _slash, rest = pattern.rstrip("/").partition("/")
        for found in self.iterdir():
            if fnmatch.fnmatchcase(found.name, first) and (not rest or (found / rest).exists()):
                yield found / rest if rest else found

    def samefile(self, other_path: Any) -> bool:
        """Whether the other is the same URL."""
        return str(self) == str(other_path)

    def absolute(self) -> "RemotePath":
        """Return itself."""
        return self

    def resolve(self, strict: bool = False) -> "RemotePath":
        """Return itself."""
        return self

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Raise `OSError`."""
        raise OSError(errno.EROFS, "a URL, and only `kvcanary ship` writes there", str(self))

    def open(self, mode: str = "r", *_: Any, **__: Any) -> IO[Any]:  # type: ignore[override]  # for reading bytes alone
        """Return a copy without a name, for what is small beside a trace; raise `OSError`."""
        if mode != "rb":
            raise OSError(errno.EROFS, "a URL, and only `kvcanary ship` writes there", str(self))
        import tempfile

        remote, at = RemoteFile(self, ahead=2), 0
        file = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
        try:
            part = memoryview(bytearray(_COPIED_BYTES))
            while came := remote.read_into(part, at):
                file.write(part[:came])
                at += came
        except BaseException:
            file.close()
            raise
        finally:
            remote.close()
        file.seek(0)
        return file


@functools.lru_cache
def _filesystem(scheme: str, bucket: str, tries: int) -> Any:
    """Return pyarrow's file system for a scheme."""
    import pyarrow.fs as fs

    if scheme == "s3":
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if not region and not endpoint:
            region = fs.resolve_s3_region(bucket)
        retries = fs.AwsStandardS3RetryStrategy(max_attempts=tries)
        waits = {"connect_timeout": _CONNECT_S, "request_timeout": _REQUEST_S}
        return fs.S3FileSystem(region=region, endpoint_override=endpoint, retry_strategy=retries, **waits)
    if scheme in ("gs", "gcs"):
        return fs.GcsFileSystem()
    if scheme in ("abfs", "abfss"):
        return fs.FileSystem.from_uri(f"{scheme}://{bucket}/")[0]
    try:
        import fsspec
    except ModuleNotFoundError:
        raise ImportError(f"{scheme}:// needs fsspec: pip install 'kvcanary[store]'") from None
    return fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem(scheme)))


def located(path: RemotePath, *, tries: int = 1) -> tuple[Any, str]:
    """Return the file system of a URL, and its name there; raise `OSError`. `tries` of its own are for whom `retried` cannot help."""
    scheme, _, rest = str(path).partition("://")
    filesystem = retried(path, lambda: _filesystem(scheme, rest.partition("/")[0], tries))
    if scheme in ("abfs", "abfss"):
        rest = f"{rest.partition('@')[0]}/{rest.partition('/')[2]}"
    return filesystem, rest


def put(path: RemotePath, content: bytes) -> None:
    """Write a small object: it is there whole, in place of an older one, or not at all. Raises `OSError`."""
    filesystem, key = located(path)
    partial = located(path.with_name(f".{path.name}.{uuid.uuid4().hex}.part"))[1]

    def send() -> None:
        with filesystem.open_output_stream(partial) as out:
            out.write(content)
        filesystem.move(partial, key)

    retried(path, send)


def retried(path: Path, act: Callable[[], T]) -> T:
    """Return what `act` does; what may pass is tried again, for some eight seconds. Raises `OSError` with one line."""
    for wait in (*WAITS_S, None):
        try:
            return act()
        except Exception as error:  # noqa: BLE001  # each store's library has its own
            for_good = _for_good(path, error)
            if for_good is not None:
                raise for_good from None
            if wait is None:
                tries = len(WAITS_S) + 1
                raise OSError(errno.EIO, f"failed {tries} times, last with: {_line(error)}", str(path)) from None
            time.sleep(wait * (0.5 + os.urandom(1)[0] / 512))  # so that many readers do not come back at once
    raise AssertionError  # the last wait is None


def mapped(act: Callable[[Path], T], paths: Sequence[Path]) -> Iterator[T]:
    """Yield what `act` returns of each path, in order; of URLs sixteen are asked at a time."""
    if not any(isinstance(path, RemotePath) for path in paths):
        yield from map(act, paths)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="kvcanary-ask") as asking:
        yield from asking.map(act, paths)


def _for_good(path: Path, error: Exception) -> OSError | None:
    """Return the error that no further try helps against, None for one that may pass."""
    text = str(error)
    if isinstance(error, ImportError | ValueError):  # no library for the scheme; a name that is none
        return OSError(errno.EPROTONOSUPPORT, _line(error), str(path))
    if isinstance(error, FileNotFoundError) or "NO_SUCH_BUCKET" in text:
        return _absent(path)
    if isinstance(error, PermissionError) or _DENIED.search(text):
        advice = "credentials come from the environment (AWS_ACCESS_KEY_ID ...; see the page on object stores)"
        return PermissionError(errno.EACCES, f"the store denies access; {advice}", str(path))
    return None


def _absent(path: Path) -> FileNotFoundError:
    what = "no such object"
    with contextlib.suppress(Exception):  # what was asked for is not there, whatever this says
        filesystem, key = located(RemotePath(path))
        if not filesystem.get_file_info(key.partition("/")[0]).type:
            what = "there is no such bucket"
    return FileNotFoundError(errno.ENOENT, what, str(path))


def _line(error: Exception) -> str:
    line = first_line(error)
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]} ..."


class RemoteFile:
    """An object opened for reading by ranges, whole chunks of which are kept, the next `ahead` of them fetched meanwhile.

    Any number of threads may read. Raises `OSError` if it cannot be opened.
    """

    def __init__(self, path: RemotePath, *, ahead: int = 0) -> None:
        from concurrent.futures import ThreadPoolExecutor  # an engine that imports this module needs none

        self.path, self._ahead = path, ahead
        # Where headers alone are read little is fetched; behind that a request each is dear.
        self._chunk_bytes = 4 << 20 if ahead else 64 << 10
        filesystem, key = located(path)
        self._file = retried(path, lambda: filesystem.open_input_file(key))
        self.size: int = self._file.size()
        self._chunks: OrderedDict[int, Future[bytes]] = OrderedDict()
        self._lock = Lock()
        self._failure: OSError | None = None
        self._pool = ThreadPoolExecutor(ahead + 1, thread_name_prefix="kvcanary-read")

    def again(self, *, ahead: int) -> "RemoteFile":
        """Return the same object opened anew."""
        return RemoteFile(self.path, ahead=ahead)

    def close(self) -> None:
        """Close it; what is being fetched is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._chunks.clear()

    def read_into(self, data: memoryview, start: int) -> int:
        """Fill `data` from byte `start` on, as far as the object goes, and return how far; raise `OSError`."""
        done, end = start, min(start + len(data), self.size)
        while done < end:
            number, skip = divmod(done, self._chunk_bytes)
            part = memoryview(self._chunk(number))[skip : skip + end - done]
            data[done - start : done - start + len(part)] = part
            done += len(part)
        return max(done - start, 0)

    def _chunk(self, number: int) -> bytes:
        with self._lock:
            for one in range(number, number + 1 + self._ahead):
                if one not in self._chunks and one * self._chunk_bytes < self.size:
                    self._chunks[one] = self._pool.submit(self._fetch, one)
            self._chunks.move_to_end(number)
            while len(self._chunks) > 2 * self._ahead + 4:
                self._chunks.popitem(last=False)
            wanted = self._chunks[number]
        return wanted.result()

    def _fetch(self, number: int) -> bytes:
        start = number * self._chunk_bytes
        size = min(self._chunk_bytes, self.size - start)

        def fetch() -> bytes:
            if self._failure is not None:  # whoever searches the rest of it would wait anew at every place
                raise ValueError(self._failure.strerror)
            came: bytes = self._file.read_at(size, start)
            if len(came) != size:
                raise OSError(f"{len(came)} of {size} bytes came")
            return came

        try:
            return retried(self.path, fetch)
        except OSError as error:
            self._failure = self._failure or error
            raise
