"""How long each merged row lasts, kept on disk until the file that says so can be written."""

import os
import tempfile
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64Array = npt.NDArray[np.int64]


class Spans:
    """Last forward and number of forwards of merged rows, by their number in the file; in a nameless file of `folder`."""

    _GROW: Final = 1 << 20

    def __init__(self, folder: Path) -> None:
        self._file: BinaryIO = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # `close` gives it back
        self._values: Int64Array = np.zeros((0, 2), np.int64)
        self.any = False

    def note(self, numbers: Int64Array, last_forwards: Int64Array, counts: Int64Array) -> None:
        """Note rows that stand for several forwards."""
        if not len(numbers):
            return
        self.any = True
        size = len(self._values)
        wanted = int(numbers.max()) + 1
        if wanted > size:
            size = max(wanted, min(2 * size, size + self._GROW), 1024)
            # Written, not only made longer: a full disk is an error here, and would be the process's end in a map.
            self._file.seek(0, os.SEEK_END)
            self._file.write(bytes(16 * (size - len(self._values))))
            self._file.flush()
            self._values = np.memmap(self._file, np.int64, "r+", shape=(size, 2))
        self._values[numbers, 0] = last_forwards
        self._values[numbers, 1] = counts

    def applied(self, table: pa.Table, first: int) -> pa.Table:
        """Return rows of the file from number `first` on with what is noted of them."""
        part = np.zeros((table.num_rows, 2), np.int64)
        known = self._values[first : first + table.num_rows]
        part[: len(known)] = known
        merged = part[:, 1] > 0
        for name, column in (("last_forward", 0), ("num_forwards", 1)):
            at = table.schema.get_field_index(name)
            values = np.where(merged, part[:, column], table[name].to_numpy())
            table = table.set_column(at, table.schema.field(at), pa.array(values))
        return table

    def close(self) -> None:
        """Give the file back."""
        self._values = np.zeros((0, 2), np.int64)
        self._file.close()
