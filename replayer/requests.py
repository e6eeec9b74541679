"""The requests that a trace has named so far."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa


@dataclass(slots=True)
class RequestBook:
    """Names and prompt lengths of the requests, by their 64-bit id."""

    names: dict[int, str] = field(default_factory=dict)
    prompt_lens: dict[int, int] = field(default_factory=dict)

    def name(self, request_id: int) -> str:
        """Return a request's name, or its number where no request event named it."""
        return self.names.get(request_id) or (str(request_id) if request_id >= 0 else "")

    def name_column(self, request_ids: npt.NDArray[np.int64]) -> pa.Array:
        """Return the names of many requests."""
        unique, inverse = np.unique(request_ids, return_inverse=True)
        return pa.array([self.name(int(i)) for i in unique], type=pa.utf8()).take(pa.array(inverse))
