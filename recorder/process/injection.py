"""Which fault `kvcanary inject` asks an engine's processes for, by one variable, never by a file of settings."""

import json
from dataclasses import asdict, dataclass
from typing import Final

from .settings import PREFIX

INJECT: Final = PREFIX + "INJECT"
MARK_NOTE: Final = "fault injected"  # the lab's marks have it too

# What each fault does: the published canary's five.
FAULTS: Final = {
    "req_to_token": "one entry of a request's block table points to another's slot (vLLM: block, transformers: page) "
    "for one forward",
    "kv_used": "the first byte of a slot that the forward reads is flipped",
    "kv_unused_cache": "the same, of a slot that the prefix cache alone holds, before a sweep",
    "kv_post_forward": "the same, of a slot that the forward has just written",
    "next_token_swap": "two requests get each other's sampled tokens; the hash oracle samples",
}
# Which violations or findings each must be seen by.
SEEN_BY: Final = {
    "req_to_token": ("VERIFY_CHAIN_HASH", "VERIFY_POSITION", "VERIFY_TOKEN"),
    "kv_used": ("VERIFY_KV_HASH",),
    "kv_unused_cache": ("VERIFY_KV_HASH",),
    "kv_post_forward": ("VERIFY_KV_HASH",),
    "next_token_swap": ("oracle_token", "WRITE_TOKEN"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """One fault: in the first forward from number `at` on that has a place for it, to `request` ("": any), drawn by `seed`.

    Raises `ValueError` for a fault that there is not.
    """

    fault: str
    at: int = 20
    request: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.fault not in FAULTS:
            raise ValueError(f"fault is {self.fault!r}, expected one of {', '.join(FAULTS)}")

    def to_json(self) -> str:
        """Return it as the variable holds it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Injection":
        """Parse it; raise `ValueError` for anything that `kvcanary inject` does not set."""
        try:
            values = json.loads(text)
            return cls(
                fault=str(values["fault"]),
                at=int(values["at"]),
                request=str(values["request"]),
                seed=int(values["seed"]),
            )
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{INJECT} is set, and not by kvcanary inject ({error}); leave it out") from None
