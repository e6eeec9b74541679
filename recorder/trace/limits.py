"""What a trace may ask of whoever reads it, in one table; docs/reference/limits.md says why.

Each limit is held before memory is taken. What a header says of the sizes of pools and tables is bounded in `header.py`,
where it stands.
"""

from typing import Final

MAX_HEADER_BYTES: Final = 8 << 20
MAX_TEXT_CHARS: Final = 1 << 16  # of one text in the header
MAX_MISSING_SEGMENTS: Final = 1_000  # listed of those that lack between two others
MAX_BATCH_METADATA_BYTES: Final = 1 << 18  # of one batch: its columns, their buffers and its numbers
MAX_FREE_BATCH_BYTES: Final = 256 << 20  # of one batch, decompressed, whatever it takes in the file
MAX_BATCH_RATIO: Final = 300  # of a larger one, times the bytes that it takes in the file
MAX_SEARCHED: Final = 16  # times a damaged file's size that may be tried in search of its next whole batch
