"""What an engine's process attaches to itself: the recordings, the hooks that still work, and how the recordings end."""

import contextlib
import importlib
import importlib.metadata
import logging
import os
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from ...errors import error_text
from ...process.environment import is_wanted, share_run_id
from .stopping import serve_stop, stop_on_sigterm

logger = logging.getLogger("kvcanary")


class EngineAttachment:
    """The recordings of one process. A subclass has a method `on_<hook>` for each function of the engine that it hooks.

    A hook is called with the arguments of the function that it is around. One that fails is logged once, and what it
    feeds is switched off: a failure of one in `ending` ends the recording; for another the trace says that events are
    missing, and the rest goes on.
    """

    engine: ClassVar[str]
    ending: ClassVar[frozenset[str]] = frozenset()  # hooks without which the trace would be judged wrongly

    def __init__(self) -> None:
        self.off: set[str] = set()

    def recorders(self) -> Sequence[Any]:
        """Return the open recorders."""
        raise NotImplementedError

    def fault(self, hook: str, error: Exception) -> None:
        """Switch off a hook that failed."""
        if hook in self.off:
            return
        self.off.add(hook)
        recorders = self.recorders()
        if not recorders:
            logger.error("kvcanary: not recording: %s: %s", hook, error_text(error), exc_info=error)
        for recorder in recorders:
            self.fail(recorder, hook, error, ends=hook in self.ending)

    def fail(self, recorder: Any, hook: str, error: Exception, *, ends: bool) -> None:
        """Have a trace say that a hook failed; `ends` says that nothing after it can be recorded."""
        what, said = f"{self.engine} adapter, {hook}", recorder.error_text(error)
        if ends:
            recorder.switch_off(f"{what}: {said}", error)
        else:
            logger.error("kvcanary: %s is no longer recorded: %s", what, said, exc_info=error)
            recorder.lost(f"{what} is no longer recorded: {said}")

    def close(self) -> None:
        """End the traces."""
        for recorder in self.recorders():
            recorder.close()

    def end_with_process(self) -> None:
        """End the traces if the engine is about to kill this process, or SIGTERM does."""
        serve_stop(self.close)
        stop_on_sigterm(self.close)


def begin_plugin(engine: str, package: str) -> None:
    """Set an engine's hooks, by `install` of an adapter's module `hooks`, if a recording is asked for; never raises."""
    if is_wanted():
        try:
            share_run_id()
            importlib.import_module(".hooks", package).install()
        except Exception:
            logger.exception("kvcanary: not recording: the %s adapter could not be set up", engine)


def installed_version(*packages: str) -> str:
    """Return the version of the first of these packages that is installed; empty for none, as of a checkout."""
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return ""


def trace_name(engine: str, header: Any, number: int = 0) -> str:
    """Return the name of a process's trace: when, role, ranks, process; `number` counts the traces of one process."""
    ranks = header.ranks
    when = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    role, more = f"-{header.role}" if header.role else "", f"-{number}" if number else ""
    place = f"dp{ranks.dp_rank}-pp{ranks.pp_rank}-tp{ranks.tp_rank}"
    return f"{engine}-{when}{role}-{place}-{os.getpid()}{more}.arrow"
