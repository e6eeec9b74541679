"""Which request and which position each token of a forward belongs to."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .forward import Forward

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTokens:
    """A forward's tokens without its padding: `request` `[n] int64` index into the batch, `position` `[n] int64`.

    Token i of the batch is entry i here; padding comes last in a batch and is left out.
    """

    request: Int64Array
    position: Int64Array


def batch_tokens(forward: Forward) -> BatchTokens:
    """Lay a forward's tokens out by request and position, counting positions from the prefix."""
    lens = np.where(forward.req_pool_indices == 0, 0, np.maximum(forward.extend_lens, 0))
    request = np.repeat(np.arange(len(lens)), lens)
    within = np.arange(len(request)) - np.repeat(np.cumsum(lens) - lens, lens)
    return BatchTokens(request=request, position=forward.prefix_lens[request] + within)
