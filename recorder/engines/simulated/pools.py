"""The KV pools: for each slot the KV bytes that the recorder sees, and the content word that the model reads."""

import numpy as np
import numpy.typing as npt

from ....kernels.ops.hash.kv_source import KvSource
from ...trace.header import PoolGroup

Int64Array = npt.NDArray[np.int64]
WordArray = npt.NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def scramble(words: WordArray) -> WordArray:
    """Return the splitmix64 finaliser of each word."""
    words = words ^ (words >> np.uint64(30))
    words = words * _MIX1
    words = words ^ (words >> np.uint64(27))
    words = words * _MIX2
    return words ^ (words >> np.uint64(31))


class KvPool:
    """One pool group: `content` `[num_slots] uint64`, the word that stands for a slot's whole KV; `streams[i]`
    `[pages, page_size * bytes_per_token] uint8`, the bytes of one captured layer and half; the same for the host tier.
    """

    def __init__(self, group: PoolGroup, *, index: int) -> None:
        self.group = group
        self.index = index
        self.content: WordArray = np.zeros(group.num_slots, np.uint64)
        self.host_content: WordArray = np.zeros(group.host_num_slots, np.uint64)
        self._words = [np.zeros((group.num_slots, s.bytes_per_token // 8), np.uint64) for s in group.streams]
        self._host_words = [np.zeros((group.host_num_slots, s.bytes_per_token // 8), np.uint64) for s in group.streams]
        self.submitted: dict[int, WordArray] = {}  # what was handed in last, `[n, words]` for each stream
        self._salts = [
            scramble((np.arange(words.shape[1], dtype=np.uint64) + np.uint64(1 + 97 * number)) * _GAMMA)
            for number, words in enumerate(self._words)
        ]

    def sources(self) -> list[KvSource]:
        """Return the pool's bytes as the recorder takes them, a stream each."""
        pages = self.group.num_slots // self.group.page_size
        return [
            KvSource(
                tensor=words.view(np.uint8).reshape(pages, -1),
                page_size=self.group.page_size,
                bytes_per_token=stream.bytes_per_token,
                read_bytes=stream.bytes_per_token,
            )
            for words, stream in zip(self._words, self.group.streams, strict=True)
        ]

    def stream_bytes(self, stream: int) -> npt.NDArray[np.uint8]:
        """Return one stream as `[num_slots, bytes_per_token] uint8`, a view that may be written."""
        return self._words[stream].view(np.uint8)

    def write(self, slots: Int64Array, content: WordArray, noise: WordArray | None) -> None:
        """Write tokens' KV: bytes follow from the content word, but for the low bits that `noise` flips.

        `slots` `[n] int64`, `content`, `noise` `[n] uint64`. Where a slot comes twice, the last write stays.
        """
        self.content[slots] = content
        for number, (words, salt) in enumerate(zip(self._words, self._salts, strict=True)):
            rows = scramble(content[:, None] ^ salt)
            self.submitted[number] = words[slots] = rows if noise is None else rows ^ noise[:, None]

    def copy(self, src: Int64Array, dst: Int64Array) -> None:
        """Copy whole slots within the pool."""
        self.content[dst] = self.content[src]
        for words in self._words:
            words[dst] = words[src]

    def to_host(self, slots: Int64Array, host_slots: Int64Array) -> None:
        """Copy whole slots from the pool to the host tier."""
        self.host_content[host_slots] = self.content[slots]
        for words, host in zip(self._words, self._host_words, strict=True):
            host[host_slots] = words[slots]

    def from_host(self, host_slots: Int64Array, slots: Int64Array) -> None:
        """Copy whole slots from the host tier to the pool."""
        self.content[slots] = self.host_content[host_slots]
        for words, host in zip(self._words, self._host_words, strict=True):
            words[slots] = host[host_slots]
