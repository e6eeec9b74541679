"""What the engine's requests get as their next token."""

import numpy as np
import numpy.typing as npt

from ....kernels.ops.oracle.reference import oracle_tokens
from .config import EngineConfig
from .pools import WordArray, scramble

Int64Array = npt.NDArray[np.int64]


class Sampler:
    """Draws tokens by the config's rule; a resumed request gets the same ones again."""

    def __init__(self, config: EngineConfig) -> None:
        self._kind = config.sampler
        self._vocab_size = config.vocab_size
        self._salt = scramble(np.array([config.seed & 0xFFFFFFFF], np.uint64) + np.uint64(0x5EED))

    def tokens(self, request_ids: Int64Array, positions: Int64Array, content: WordArray | None) -> Int64Array:
        """Return the token of each `(request id, position)`, all `[n]`; `content` is what the model made of the
        context, which only the sampler "content" looks at.
        """
        if self._kind == "oracle":
            out = np.empty(positions.size, np.int64)
            oracle_tokens(request_ids=request_ids, positions=positions, vocab_size=self._vocab_size, out=out)
            return out
        if self._kind == "content" and content is not None:
            words = scramble(content ^ self._salt)
        else:
            words = scramble(scramble(request_ids.view(np.uint64) ^ self._salt) ^ positions.view(np.uint64))
        return (words % np.uint64(self._vocab_size)).astype(np.int64)
