"""Ending a trace in a process that is about to be killed, by SIGTERM or by the engine.

Service managers send SIGTERM to every process of a service; SGLang ends its own by SIGKILL, at a normal exit too. So a
recording process listens on a socket that is named after its id (Linux's abstract namespace: nothing in the file
system); the process that is about to kill it connects, and the answer comes when the trace is whole.
"""

import contextlib
import importlib
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger("kvcanary")

DONE: Final = b"done"
PATIENCE_S: Final = 20.0
ACCEPT_AGAIN_S: Final = 0.2


def _address(pid: int) -> str:
    """Return a process's address; containers that share a network may have processes of the same id."""
    return f"\0kvcanary-stop-{Path('/proc/self/ns/pid').readlink()}-{pid}"


def serve_stop(stop: Callable[[], None]) -> None:
    """Call `stop` when a process of the same user asks for it; once, in a thread of its own.

    If there are no such sockets (not Linux) nothing happens, and a killed process leaves a torn trace.
    """
    listener = None
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(_address(os.getpid()))
        listener.listen()
    except (OSError, AttributeError):
        if listener is not None:
            listener.close()
        logger.warning("kvcanary: no socket for the engine's end; its trace will be torn (kvcanary recover)")
        return

    def serve() -> None:
        with listener:
            while True:
                try:
                    asker, _ = listener.accept()
                except OSError:  # the process has no descriptor left at this moment
                    time.sleep(ACCEPT_AGAIN_S)
                    continue
                with asker:
                    _, uid, _ = struct.unpack("3i", asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                    if uid in (os.getuid(), 0):
                        stop()
                        with contextlib.suppress(OSError):  # who asked may have lost patience
                            asker.sendall(DONE)
                        return

    threading.Thread(target=serve, name="kvcanary-stop", daemon=True).start()


def stop_tree(
    parent_pid: int | None = None, include_parent: bool = True, skip_pid: int | None = None, **_: Any
) -> None:
    """Have the recording ones of processes that are about to be killed end their traces.

    They are `parent_pid` if `include_parent`, and all that it has started (None: that this process has), but `skip_pid`.
    """
    psutil = importlib.import_module("psutil")  # the engines have it; kvcanary by itself does not need it
    try:
        pids = [child.pid for child in psutil.Process(parent_pid).children(recursive=True)]
    except psutil.Error:  # it is gone
        return
    if parent_pid is not None and include_parent:
        pids.append(parent_pid)
    try:
        stop_processes([pid for pid in pids if pid != skip_pid])
    except KeyboardInterrupt:  # Ctrl-C once more: whoever pressed it waits no longer, and nobody is left alive for it
        logger.warning("kvcanary: processes are killed before they have ended their traces (kvcanary recover)")


def stop_processes(pids: Iterable[int], *, patience_s: float = PATIENCE_S) -> list[int]:
    """Have the recording ones among these processes end their traces; return those that said that they did.

    All are asked at once, and waited for `patience_s` seconds at most.
    """
    asked = []
    for pid in pids:
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            logger.warning("kvcanary: process %d cannot be asked to end its trace: %s", pid, error.strerror)
            continue
        try:
            connection.settimeout(1.0)
            connection.connect(_address(pid))
            asked.append((pid, connection))
        except OSError:  # not a recording process
            connection.close()
    deadline = time.monotonic() + patience_s
    done = []
    for pid, connection in asked:
        with connection:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                if connection.recv(len(DONE)) == DONE:
                    done.append(pid)
                else:  # it took the question, and then failed or was killed
                    logger.warning("kvcanary: process %d did not end its trace whole (kvcanary recover)", pid)
            except TimeoutError:
                logger.warning("kvcanary: process %d did not end its trace in time", pid)
            except (
                OSError
            ):  # it has answered somebody else who asked, as an engine's parent and grandparent do, or has ended
                logger.info("kvcanary: process %d answered somebody else, or has ended", pid)
    return done


def stop_on_sigterm(stop: Callable[[], None]) -> bool:
    """Have SIGTERM call `stop` before it ends the process; return whether it was set: in the main thread, for no handler.

    A second SIGTERM ends the process at once. `stop` is called in a thread of its own, since the main thread, which goes
    on meanwhile, may hold whatever `stop` needs; if that is stuck in native code, Python does not notice the first.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return False

    def end(number: int, _: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Thread(target=stop_and_die, args=(number,), name="kvcanary-sigterm", daemon=True).start()

    def stop_and_die(number: int) -> None:
        try:
            stop()
        finally:
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
    return True
