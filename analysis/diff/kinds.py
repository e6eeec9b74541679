"""What two traces can differ in."""

from typing import Final

CONTENT_KINDS: Final = {
    "missing": "a request that only one trace has",
    "input": "the model was fed another token",
    "position": "a token was fed at another position",
    "table": "the block table led to other content: a foreign, stale or never written slot was read",
    "sampled": "another token was sampled",
    "kv": "other KV bytes were written (or received) for the same token",
    "kv_changed": "KV bytes changed after they were written, in one trace only",
    "length": "a request ended earlier, later, or otherwise",
}
TIMING_KINDS: Final = {
    "hit": "another part of the prompt came from the prefix cache",
    "schedule": "other chunks, another number of forwards, another order, retraction",
}
KINDS: Final = {**CONTENT_KINDS, **TIMING_KINDS}
