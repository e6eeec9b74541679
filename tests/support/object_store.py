"""An S3 server on this machine, and between it and who asks a proxy that does wrong what it is told to."""

import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvcanary.recorder import remote

REFUSED = b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
SLOW_DOWN = REFUSED % (b"503 Slow Down", 61, b"<Error><Code>SlowDown</Code><Message>busy</Message></Error>".ljust(61))
DENIED = REFUSED % (b"403 Forbidden", 66, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>".ljust(66))


class FaultyProxy:
    """Passes HTTP requests on, one a connection; `faults` are the next ones' (reset, 503, 403, truncated, slow, flipped,
    and lost: what was asked for is done, and no answer comes).

    `only` is a pattern of the request lines that are meant, `always` one for all of them; `requests` has their lines.
    """

    def __init__(self, upstream: tuple[str, int]) -> None:
        self._upstream = upstream
        self.faults: list[str] = []
        self.always = ""
        self.only = ""
        self.requests: list[str] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.direct = "http://{}:{}".format(*upstream)  # for what holds the interpreter while it waits
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def heal(self) -> None:
        self.faults, self.always, self.only, self.requests = [], "", "", []

    def close(self) -> None:
        self._server.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._pass_on, args=(self._server.accept()[0],), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, ValueError):
            file = client.makefile("rb")
            line = file.readline().decode()
            if not line:
                return
            self.requests.append(line.rpartition(" ")[0])
            head, size, chunked, waits = [line.encode()], 0, False, False
            while (header := file.readline()) not in (b"\r\n", b""):
                name, _, value = header.partition(b":")
                name, value = name.lower(), value.strip()
                size = int(value) if name == b"content-length" else size
                chunked |= name == b"transfer-encoding"
                waits |= name == b"expect"
                if name not in (b"connection", b"expect"):
                    head.append(header)
            if waits:
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = b"".join(_chunks(file)) if chunked else file.read(size)
            fault = ""
            if re.search(self.only, line):
                fault = self.always or (self.faults.pop(0) if self.faults else "")
            if fault == "flipped" and body:
                middle = len(body) // 2
                body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
            if fault == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
            if fault in ("503", "403"):
                client.sendall(SLOW_DOWN if fault == "503" else DENIED)
                return
            if fault == "slow":
                time.sleep(0.3)
            with socket.create_connection(self._upstream) as server:
                server.sendall(b"".join(head) + b"Connection: close\r\n\r\n" + body)
                answer = b"".join(iter(lambda: server.recv(1 << 16), b""))
            if fault != "lost":
                client.sendall(answer[: len(answer) - 1 - len(answer) // 3] if fault == "truncated" else answer)


def _chunks(file: "object") -> Iterator[bytes]:
    while True:
        line = file.readline()  # type: ignore[attr-defined]
        count = int(line.partition(b";")[0], 16)
        yield line + file.read(count + 2)  # type: ignore[attr-defined]
        if not count:
            return


@contextlib.contextmanager
def object_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Run a server behind a proxy, named in the environment, with a bucket `bkt`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    proxy = FaultyProxy(("127.0.0.1", port))
    try:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key", "AWS_REGION": "us-east-1"}
        for name, value in {**keys, "AWS_EC2_METADATA_DISABLED": "true", "AWS_ENDPOINT_URL": proxy.url}.items():
            monkeypatch.setenv(name, value)
        # A worker may make a store, give it up and make another: what was opened by the first one's address is of no use.
        remote._filesystem.cache_clear()
        from pyarrow.fs import S3FileSystem

        for _ in range(300):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert server.poll() is None
            time.sleep(0.1)
        for name in ("bkt", "direct"):
            S3FileSystem(endpoint_override=proxy.direct, allow_bucket_creation=True).create_dir(name)
        yield proxy
    finally:
        proxy.close()
        server.send_signal(signal.SIGKILL)
        server.wait()


def put(path: Path, key: str, proxy: FaultyProxy) -> str:
    """Put a file, or all files of a folder, under a key of the bucket; return its URL."""
    from pyarrow.fs import S3FileSystem

    store = S3FileSystem(endpoint_override=proxy.url)
    for one in sorted(path.iterdir()) if path.is_dir() else [path]:
        with store.open_output_stream(f"bkt/{key}/{one.name}" if path.is_dir() else f"bkt/{key}") as out:
            out.write(one.read_bytes())
    return f"s3://bkt/{key}"


def names(key: str, proxy: FaultyProxy) -> list[str]:
    """Return what lies under a key."""
    from pyarrow.fs import FileSelector, S3FileSystem

    selector = FileSelector(f"bkt/{key}", recursive=True, allow_not_found=True)
    found = S3FileSystem(endpoint_override=proxy.url).get_file_info(selector)
    return sorted(one.path.removeprefix(f"bkt/{key}/") for one in found if one.is_file)
