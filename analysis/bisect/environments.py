"""Virtual environments for `kvcanary bisect run`: one a version, made when its turn comes, kept up to a bound."""

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.version import InvalidVersion, Version

from ..errors import AnalysisError
from .process import run_command
from .versions import folder_name

OWN: Final = Path(sys.prefix)  # the environment in which kvcanary runs, and the recorder with it
_MADE: Final = "kvcanary-made.json"  # in an environment that is whole: its size
_PIP_QUIET: Final = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


class EnvironmentFailed(Exception):  # noqa: N818  # a version that cannot be had is skipped
    """An environment could not be made; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """Makes and keeps environments below `folder`, at most `limit_bytes` of them beside the one in use.

    `install` is run in each new one, with {version} and {python} put in; `share` is an environment whose packages all see,
    behind their own, None for none. `progress` is called with what is being done.
    """

    folder: Path
    install: str
    share: Path | None
    limit_bytes: int
    progress: Callable[[str], None]

    def key(self) -> list[str]:
        """Return text that is the same only for what makes the same environments."""
        return [self.install, str(self.share or ""), sys.version]

    def path(self, version: str) -> Path:
        """Return where the environment of a version is, or will be."""
        digest = hashlib.sha256(json.dumps(self.key()).encode()).hexdigest()[:8]
        return self.folder / f"{folder_name(version)}-{digest}"

    @contextmanager
    def of(self, version: str) -> Iterator[Path]:
        """Give the environment of a version, made now if it is not there; nobody removes it meanwhile.

        Raises:
            EnvironmentFailed: it cannot be made.
            AnalysisError: the folder cannot be written, or the command that installs cannot be run.
        """
        place = self.path(version)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(f"{place}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise AnalysisError(f"{self.folder}: cannot be made ({error.strerror or error})") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (place / _MADE).is_file():
                self._make(place, version)
            os.utime(place / _MADE)  # the one that was used longest ago is the first to go
            self._remove_beyond_limit(place)
            yield place
        finally:
            os.close(lock)

    def _make(self, place: Path, version: str) -> None:
        begin = time.monotonic()
        words = [word.replace("{version}", version) for word in shlex.split(self.install)]
        words = [word.replace("{python}", str(place / "bin" / "python")) for word in words]
        self.progress(f"making the environment of {version}: {shlex.join(words)}")
        shutil.rmtree(place, ignore_errors=True)  # of a run that was killed
        uv = shutil.which("uv")
        made = [uv, "venv", "-q", "--seed", "--python", sys.executable] if uv else [sys.executable, "-m", "venv"]
        problem, _ = run_command([*made, str(place)], dict(os.environ))
        if not problem:
            if self.share is not None:
                seen = f"import site; site.addsitedir({str(packages_of(self.share))!r})\n"
                (packages_of(place) / "kvcanary-shared.pth").write_text(seen, encoding="utf-8")
            problem, _ = run_command(words, {**inside(place), **_PIP_QUIET, "KVCANARY_BISECT_VERSION": version})
        if problem:
            shutil.rmtree(place, ignore_errors=True)
            raise EnvironmentFailed(f"its environment could not be made: {problem}")
        size = sum(
            status.st_blocks * 512 // status.st_nlink  # uv links files from its own cache
            for folder, _, names in os.walk(place)
            for status in (os.lstat(os.path.join(folder, name)) for name in names)  # noqa: PTH118  # ten thousands
        )
        (place / _MADE).write_text(json.dumps({"bytes": size}), encoding="utf-8")
        self.progress(f"made in {time.monotonic() - begin:.0f} s, {size / 1e6:,.0f} MB")

    def _remove_beyond_limit(self, used: Path) -> None:
        made: list[tuple[float, int, Path]] = []
        for path in self.folder.glob(f"*/{_MADE}"):
            with suppress(FileNotFoundError):  # another bisection has removed it
                size = int(json.loads(path.read_text(encoding="utf-8"))["bytes"])
                made.append((path.stat().st_mtime, size, path.parent))
        left = self.limit_bytes
        for _, size, place in sorted(made, reverse=True):
            if place == used:
                continue
            left -= size
            if left >= 0:
                continue
            lock = os.open(f"{place}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (place / _MADE).unlink(missing_ok=True)
                shutil.rmtree(place, ignore_errors=True)
            except BlockingIOError:  # another bisection's
                pass
            finally:
                os.close(lock)


def inside(place: Path) -> dict[str, str]:
    """Return the environment variables of a process that runs in a virtual environment."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
    return {
        **kept,
        "VIRTUAL_ENV": str(place),
        "PATH": f"{place / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }


def packages_of(environment: Path) -> Path:
    """Return the folder in which the packages of a virtual environment of this Python lie."""
    if environment == OWN:
        return Path(sysconfig.get_path("purelib"))
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))


def default_install(package: str, share: Path | None) -> str:
    """Return the command that installs a version of a package: uv's if there is one, but pip alone sees what is shared."""
    tool = "uv pip install -q" if share is None and shutil.which("uv") else "{python} -m pip install -q"
    return f"{tool} {package}=={{version}}"


def package_range(text: str) -> tuple[str, str, str]:
    """Return package, first and last version of `PACKAGE==A..B`; "" for each if the text is something else."""
    found = re.fullmatch(r"([A-Za-z0-9._-]+)==([^,]+?)\.\.([^,]+)", text)
    return (found[1], found[2], found[3]) if found else ("", "", "")


def released(package: str, first: str, last: str) -> list[str]:
    """Return the released versions of a package from `first` to `last`, oldest first; raise `AnalysisError`."""
    pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else [shutil.which("pip") or "pip"]
    listed = "list the versions with --versions A,B,C"
    try:
        done = subprocess.run([*pip, "index", "versions", package], capture_output=True, text=True, check=False)
        low, high = Version(first), Version(last)
    except OSError as error:
        raise AnalysisError(f"pip cannot be run ({error.strerror or error}); {listed}") from None
    except InvalidVersion as error:
        raise AnalysisError(f"--versions {package}=={first}..{last}: {error}; {listed}") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("Available versions:")]
    if not lines:
        said = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise AnalysisError(f"pip does not know the versions of {package}: {said}; {listed}")
    every = sorted(map(Version, lines[0].partition(":")[2].split(",")))
    found = [str(version) for version in every if low <= version <= high]
    if len(found) < 2 or {first, last} - set(found):
        near = ", ".join(found[:20]) or f"none; the newest is {every[-1]}"
        raise AnalysisError(f"--versions {package}=={first}..{last}: both must be released; there are {near}")
    return found
