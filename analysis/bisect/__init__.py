"""Finding the engine version that brought a fault: over saved traces, or by recording one for each version."""

from pathlib import Path
from typing import Final

LOG: Final = Path(".kvcanary", "bisect.jsonl")
