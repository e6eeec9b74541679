"""Salted hashes in place of token ids, request names and KV bytes; the salt is never written.

What two hashes say is whether two tokens are the same, which is all that a replay asks. KV bytes are computed from tokens,
and whoever has the model's weights could tell the tokens from them; so a trace with hashed tokens has keyed digests of
them, which still show that bytes changed.
"""

import dataclasses
import hashlib
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from ...kernels.arrays import Int64Array
from ...kernels.keyed_digest import DIGEST_BYTES, KEY_BYTES, keyed_digests
from ..files import read_small_file
from ..trace import schema
from ..trace.event import TraceEvent
from ..trace.header import TraceHeader
from .host_arrays import one_of

MIN_SALT_BYTES: Final = 16
TABLE_TOKENS: Final = 1 << 18  # above every vocabulary known; a token beyond it costs a hash each time
_NO_CHANGES: Final = np.empty(0, np.int64)
_PER_DIGEST: Final = 16
_MASK: Final = (1 << 31) - 1


class Privacy:
    """Hashes tokens, names of requests, or both, by one secret salt.

    A token's hash is four bytes, without their highest bit, of BLAKE2b keyed with the salt over the token's number
    divided by 16, little-endian int64; which four is the number's remainder. A table of the first 2^18 is made once
    (about 20 ms), so that hashing an array is one look-up.

    Raises `ValueError` for a salt of fewer than 16 bytes.
    """

    __slots__ = ("_key", "_table", "kv_key", "names", "salt_id", "tokens")

    def __init__(self, salt: bytes, *, tokens: bool = True, names: bool = False) -> None:
        if len(salt) < MIN_SALT_BYTES:
            raise ValueError(f"the salt has {len(salt)} bytes, expected at least {MIN_SALT_BYTES} random ones")
        self._key = hashlib.blake2b(salt, digest_size=32, person=b"kvcanary").digest()
        self.kv_key = hashlib.blake2b(digest_size=KEY_BYTES, key=self._key, person=b"kv-bytes").digest()
        self.salt_id = hashlib.blake2b(digest_size=8, key=self._key, person=b"salt-id").hexdigest()
        self.tokens = tokens
        self.names = names
        self._table = self._hashes(np.arange(TABLE_TOKENS // _PER_DIGEST)).reshape(-1) if tokens else None

    def hash_tokens(self, tokens: Int64Array) -> Int64Array:
        """Return each token's hash, `[n] int64` from 0 to 2^31 - 1; negative ids mean unknown and stay as they are."""
        if self._table is None:
            return tokens
        # One wrapped look-up for all; what it cannot answer is put right afterwards, which is next to never.
        hashed = self._table.take(tokens, mode="clip")
        if tokens.size and tokens.min() < 0:
            hashed[tokens < 0] = tokens[tokens < 0]
        if tokens.size and tokens.max() >= TABLE_TOKENS:
            beyond = tokens >= TABLE_TOKENS
            found, places = np.unique(tokens[beyond], return_inverse=True)
            hashed[beyond] = self._hashes(found // _PER_DIGEST)[np.arange(found.size), found % _PER_DIGEST][places]
        return hashed

    def hash_name(self, name: str) -> str:
        """Return a request's name, or 16 hexadecimal digits that stand for it."""
        if not self.names or not name:
            return name
        text = name.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, digest_size=8, key=self._key, person=b"name").hexdigest()

    def hash_kv(self, event: TraceEvent, header: TraceHeader) -> None:
        """Put digests in place of an event's KV bytes: 16 bytes over each row, repeated to the row's width.

        Rows of zeros, which stand for slots without bytes, stay zeros.
        """
        for column, widths in _kv_widths(event, header).items():
            data = event.bytes.get(column)
            if data is None or not self.tokens:
                continue
            hashed, at = np.zeros_like(data), 0
            for width, count in widths:
                rows = data[at : at + width * count].reshape(count, width)
                digests = np.tile(keyed_digests(rows=rows, key=self.kv_key), width // DIGEST_BYTES)
                digests[~rows.any(axis=1)] = 0
                hashed[at : at + width * count] = digests.reshape(-1)
                at += width * count
            event.bytes[column] = hashed

    def hash_ends(self, hashes: Int64Array) -> Int64Array:
        """Return keyed digests of the hashes of a copy's ends: what was equal stays so, in whole and in the lower half."""
        if not self.tokens or not hashes.any():
            return hashes
        found = hashes.copy()
        for at in np.flatnonzero(hashes).tolist():
            whole = int(hashes[at]).to_bytes(8, "little", signed=True)
            digests = (
                hashlib.blake2b(p, digest_size=4, key=self.kv_key, person=b"end").digest() for p in (whole[:4], whole)
            )
            found[at] = int.from_bytes(b"".join(digests), "little", signed=True) or 1
        return found

    def _hashes(self, numbers: Int64Array) -> Int64Array:
        """Return the 16 hashes that each digest holds, `[n, 16] int64`."""
        places = numbers.astype("<i8").tobytes()
        digests = [
            hashlib.blake2b(places[at : at + 8], digest_size=64, key=self._key, person=b"token").digest()
            for at in range(0, len(places), 8)
        ]
        return np.frombuffer(b"".join(digests), "<u4").reshape(-1, _PER_DIGEST).astype(np.int64) & _MASK


def _kv_widths(event: TraceEvent, header: TraceHeader) -> dict[str, list[tuple[int, int]]]:
    """Return for each column of KV bytes its runs of rows, `(capture_bytes, rows)`, as docs/reference/trace-format.md lays them out."""
    if not event.bytes:
        return {}
    of_runner = [stream.capture_bytes for _, stream in header.streams(int(event.scalars.get("runner", 0)))]
    streams = event.ints.get("kv_change_stream", _NO_CHANGES).tolist()
    changed = [(width, len(list(same))) for width, same in itertools.groupby(of_runner[stream] for stream in streams)]
    if event.kind == "transfer":
        group = header.groups[int(event.ints["slot_group"][0])]
        count, widths = int(event.ints["slot_count"].sum()), [stream.capture_bytes for stream in group.streams]
    else:
        count, widths = event.ints["input_ids"].size if "input_ids" in event.ints else 0, of_runner
    written = [(width, count) for width in widths]
    return {"kv_bytes": written, "kv_submitted_bytes": written, "kv_change_bytes": changed}


def new_salt() -> bytes:
    """Return a fresh random salt."""
    return os.urandom(32)


def read_salt(path: Path) -> bytes:
    """Return the salt that a file holds, without white space at its ends.

    Raises:
        ValueError: it cannot be read, or is too short.
    """
    try:
        salt = read_small_file(path).strip()
    except OSError as error:
        raise ValueError(f"{path}: the token salt cannot be read: {error.strerror}") from None
    if len(salt) < MIN_SALT_BYTES:
        raise ValueError(
            f"{path}: the token salt has {len(salt)} bytes, expected at least {MIN_SALT_BYTES} random ones; "
            f"make one with: openssl rand -hex 32 > {path}"
        )
    return salt


def with_privacy(header: TraceHeader, privacy: Privacy) -> TraceHeader:
    """Return the header of a trace with hashes in it: what is hashed stands there, and no oracle foretells a hash."""
    notes = header.notes
    if any(group.streams for group in header.groups) and privacy.tokens:
        notes = (*notes, "the KV bytes are keyed digests")
    if privacy.names:
        notes = (*notes, "the requests' names are salted hashes")
    if not privacy.tokens:
        return dataclasses.replace(header, notes=notes, salt_id=privacy.salt_id)
    if header.oracle is not None:
        notes = (*notes, f"tokens are salted hashes: the engine's {header.oracle.kind} oracle is not checked against")
    if header.sampler is not None:
        notes = (*notes, f"tokens are salted hashes: the oracle {header.sampler.name} does not sample")
    return dataclasses.replace(header, tokens="hashed", oracle=None, sampler=None, notes=notes, salt_id=privacy.salt_id)


class IdentityValue(NamedTuple):
    """What a request's KV depends on beside its tokens: a LoRA adapter, a cache salt, the weights' version, or media.

    `value` is kept as a hash; "" says that there is none. Of media `length` positions from `start` on have it; a value of
    "media" without positions says that there are no others. Of a forward it is what `length` tokens of its request number
    `start` are computed with instead.
    """

    kind: str  # of IDENTITY_KINDS
    value: str
    start: int = 0
    length: int = 0


def chosen_identity(identity: Sequence[IdentityValue], chosen: Sequence[int]) -> list[IdentityValue]:
    """Return the part of a forward's that some of its requests have, by their places, ascending."""
    at = {place: new for new, place in enumerate(chosen)}
    return [one._replace(start=at[one.start]) for one in identity if one.start in at]


def identity_columns(identity: Sequence[IdentityValue], hash_name: Callable[[str], str]) -> dict[str, Int64Array]:
    """Return a request's identity as columns; `hash_name` keeps texts private, if names are."""
    rows = []
    for kind, value, start, length in identity:
        one_of("identity kind", kind, schema.IDENTITY_KINDS)
        text = hash_name(str(value)).encode("utf-8", "surrogatepass")
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True) or 1
        rows.append((schema.IDENTITY_KINDS.index(kind), int(start), int(length), number if value else 0))
    columns = np.array(rows, np.int64).T.copy()
    return dict(zip(("identity_kind", "identity_start", "identity_count", "identity_hash"), columns, strict=True))
