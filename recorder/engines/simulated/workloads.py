"""Workloads: random by seed, or from published request traces (Mooncake's jsonl, Azure's csv).

Published traces carry lengths and block hashes; tokens are made from the hashes, so that equal blocks are equal tokens.
"""

import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, BinaryIO, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from ....kernels.arrays import Int32Array, Int64Array
from ....kernels.ops.hash.reference import splitmix64_words
from ...trace.header import Chance, Positive, check_fields
from .config import WorkloadError
from .requests import NEVER, RequestSpec

MAX_PRIORITIES: Final = 1 << 20


ADAPTERS: Final = ("", *(f"adapter-{number}" for number in range(1, 9)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomWorkload:
    """A stream of requests; iterating it twice gives the same ones. Raises `ValueError` on numbers without a meaning."""

    requests: Positive
    seed: int = 0  # of all that is random here
    prompt_tokens: Positive = 120  # mean length of a prompt; lengths are geometric
    output_tokens: Positive = 40  # mean length of an answer
    max_tokens: Annotated[int, Meta(ge=2)] = 900  # no request is longer than this, prompt and answer
    sharing: Chance = 0.5  # chance that a prompt begins with one that came before, cut at random
    num_prefixes: Positive = 16  # how many earlier prompts are remembered for that
    arrival_rate: Annotated[float, Meta(gt=0)] = 40.0  # requests a second of simulated time
    priorities: Annotated[int, Meta(ge=1, le=MAX_PRIORITIES)] = 1  # number of priorities, drawn evenly
    abort_rate: Chance = 0.0  # chance that a request is aborted on its way
    fork_rate: Chance = 0.0  # chance that a request asks for two to four answers
    vocab_size: int = 32_000  # tokens are drawn below it
    adapters: Annotated[int, Meta(ge=0, lt=len(ADAPTERS))] = (
        0  # LoRA adapters, one of which or none a request asks for, drawn evenly
    )

    def __post_init__(self) -> None:
        check_fields(self)

    def __iter__(self) -> Iterator[RequestSpec]:
        random = np.random.default_rng([self.seed, 0x3047])
        remembered: list[Int32Array] = []
        arrival_s = 0.0
        for _ in range(self.requests):
            arrival_s += float(random.exponential(1 / self.arrival_rate))
            length = min(int(random.geometric(1 / self.prompt_tokens)), self.max_tokens - 1)
            prompt = random.integers(0, self.vocab_size, length).astype(np.int32)
            if remembered and random.random() < self.sharing:
                earlier = remembered[int(random.integers(len(remembered)))]
                cut = len(earlier) if random.random() < 0.3 else int(random.integers(len(earlier) + 1))
                # Sometimes nothing of its own: the very same prompt again.
                own = prompt[:0] if cut and random.random() < 0.2 else prompt
                prompt = np.concatenate([earlier[:cut], own])[: self.max_tokens - 1]
            if len(remembered) < self.num_prefixes:
                remembered.append(prompt)
            else:
                remembered[int(random.integers(self.num_prefixes))] = prompt
            answer = min(int(random.geometric(1 / self.output_tokens)), self.max_tokens - len(prompt))
            aborted = random.random() < self.abort_rate
            yield RequestSpec(
                arrival_s=arrival_s,
                prompt=prompt,
                max_new_tokens=answer,
                priority=int(random.integers(self.priorities)),
                copies=int(random.integers(2, 5)) if random.random() < self.fork_rate else 1,
                abort_at=int(random.integers(0, len(prompt) + answer)) if aborted else NEVER,
                adapter=ADAPTERS[int(random.integers(self.adapters + 1))] if self.adapters else "",
            )


BLOCK_TOKENS: Final = 512
MAX_TOKENS: Final = 1 << 22  # of one request; more is a damaged line
MAX_LINE_BYTES: Final = 1 << 20
AZURE_COLUMNS: Final = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
_AZURE_LINE: Final = "a line as 2023-11-16 18:17:03.9799600,4808,10"
_MOONCAKE_LINE: Final = (
    '{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [one for each 512 tokens]}'
)

_Length = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
_Entry = tuple[float, Int64Array | None, int, int]  # arrival in seconds, block hashes, prompt tokens, answer tokens
_Given = TypeVar("_Given")


class _Mooncake(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0, lt=1e15)]  # ms
    input_length: _Length
    output_length: _Length
    hash_ids: list[Annotated[int, Meta(ge=0, lt=1 << 62)]]


class _Azure(NamedTuple):
    stamp: str
    context_tokens: _Length
    generated_tokens: _Length


@dataclass(frozen=True, slots=True, kw_only=True)
class FileWorkload:
    """The requests of a file, read as they are wanted; iterating raises `WorkloadError` on a line that cannot be used.
    Raises `ValueError` on numbers without a meaning, `WorkloadError` on a file of another kind.
    """

    path: Path  # ends in .jsonl (Mooncake) or .csv (Azure)
    fraction: Annotated[float, Meta(gt=0, le=1)] = 1.0  # of the file that is read, from its start
    scale_time: Annotated[float, Meta(ge=0, le=1e300)] = 1.0  # multiplies arrival times: 0.1 is ten times the load
    limit: int = 0  # requests at most, 0 for all
    seed: int = 0  # which the tokens follow from
    vocab_size: int = 32_000

    def __post_init__(self) -> None:
        check_fields(self)
        if self.path.suffix not in (".jsonl", ".csv"):
            raise WorkloadError(
                f"{self.path}: expected a name that ends in .jsonl (Mooncake's format) or .csv (Azure's), "
                f"came {self.path.suffix or 'no ending'!r}"
            )

    def __iter__(self) -> Iterator[RequestSpec]:
        for number, (arrival_s, blocks, tokens, answer) in enumerate(self._entries()):
            # An Azure request has no block hashes: every one of its blocks is its own.
            hashes = blocks if blocks is not None else np.arange(-(-tokens // BLOCK_TOKENS)) + ((number + 1) << 32)
            yield RequestSpec(
                arrival_s=arrival_s * self.scale_time,
                prompt=block_tokens(hashes, seed=self.seed, vocab_size=self.vocab_size)[:tokens],
                max_new_tokens=answer,
            )

    def longest(self) -> int:
        """Return the tokens, prompt and answer, of the longest request."""
        return max((tokens + answer for _, _, tokens, answer in self._entries()), default=0)

    def _entries(self) -> Iterator[_Entry]:
        read = self._mooncake if self.path.suffix == ".jsonl" else self._azure
        try:
            # It is read twice, the first time for the longest request: a pipe would be empty then, or wait for ever.
            if not stat.S_ISREG(self.path.stat().st_mode):
                raise WorkloadError(f"{self.path}: not a regular file; it is read twice, so copy it to one first")
            with self.path.open("rb") as file:
                for number, entry in enumerate(read(file)):
                    if self.limit and number >= self.limit:
                        return
                    yield entry
        except OSError as error:
            raise WorkloadError(f"{self.path}: cannot be read: {error.strerror}") from None

    def _lines(self, file: BinaryIO) -> Iterator[tuple[int, str]]:
        end = self.path.stat().st_size * self.fraction
        number, at = 0, 0
        while at < end and (line := file.readline(MAX_LINE_BYTES)):
            number += 1
            at += len(line)
            if len(line) == MAX_LINE_BYTES:
                raise self._bad(number, f"a line of less than {MAX_LINE_BYTES:,} bytes", "a longer one")
            try:
                text = line.decode("utf-8").strip()
            except UnicodeDecodeError:
                raise self._bad(number, "text in UTF-8", f"{line[:40]!r}") from None
            if text:
                yield number, text

    def _mooncake(self, file: BinaryIO) -> Iterator[_Entry]:
        for number, line in self._lines(file):
            given = self._parsed(number, line, partial(msgspec.json.decode, type=_Mooncake))
            blocks = -(-given.input_length // BLOCK_TOKENS)
            if len(given.hash_ids) < blocks:
                wanted = f"hash_ids with {blocks} numbers, one for each 512 tokens"
                raise self._bad(number, wanted, f"{len(given.hash_ids)} entries")
            hashes = np.array(given.hash_ids[:blocks], np.int64)
            yield given.timestamp / 1000, hashes, given.input_length, given.output_length

    def _azure(self, file: BinaryIO) -> Iterator[_Entry]:
        first: datetime | None = None
        for number, line in self._lines(file):
            if number == 1:
                if line.split(",") != AZURE_COLUMNS:
                    raise self._bad(number, f"the columns {','.join(AZURE_COLUMNS)}", line)
                continue
            given = self._parsed(number, line, lambda text: msgspec.convert(text.split(","), _Azure, strict=False))
            try:
                # Seven digits of a second's fraction; datetime takes six.
                time = datetime.fromisoformat(given.stamp[:26])
                first = first or time
                arrival_s = max(0.0, (time - first).total_seconds())
            except ValueError:
                raise self._bad(number, _AZURE_LINE, line) from None
            except TypeError:
                raise self._bad(number, "a time zone in every line or in none", line) from None
            yield arrival_s, None, given.context_tokens, given.generated_tokens

    def _parsed(self, number: int, line: str, parse: Callable[[str], _Given]) -> _Given:
        """Return what a line says; raise `WorkloadError` that shows a line as it should be, and what is wrong with this one."""
        try:
            return parse(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            expected = _MOONCAKE_LINE if self.path.suffix == ".jsonl" else _AZURE_LINE
            raise self._bad(number, f"{expected} ({error})", line) from None

    def _bad(self, number: int, expected: str, came: str) -> WorkloadError:
        return WorkloadError(f"{self.path}: line {number}: expected {expected}, came {came[:120]}")


def block_tokens(hashes: Int64Array, *, seed: int, vocab_size: int) -> Int32Array:
    """Return the tokens of blocks, 512 for each hash, `[512 * n] int32`."""
    offsets = np.arange(BLOCK_TOKENS, dtype=np.uint64)
    base = splitmix64_words(hashes.view(np.uint64) ^ (np.uint64(seed & 0xFFFFFFFF) << np.uint64(24)))
    words = splitmix64_words(base[:, None] + offsets)
    return (words % np.uint64(vocab_size)).astype(np.int32).reshape(-1)
