"""One forward, as the engine is about to run it."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Step:
    """What the engine is about to run; arrays as in `recorder.forward_input.ForwardInput`, requests' facts by row.

    `rooms` and `prompt_lens` are -1 where a row has none; the first `num_requests` rows are no padding.
    """

    mode: str
    runner: int
    rows: np.ndarray
    request_ids: np.ndarray
    prefix_lens: np.ndarray
    extend_lens: np.ndarray
    input_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    truth: np.ndarray
    truth_lens: np.ndarray
    rooms: np.ndarray
    prompt_lens: np.ndarray
    num_requests: int


class Mode(str):
    """A forward mode that answers as the published `ForwardMode` does."""

    def is_extend(self) -> bool:
        """A target verify counts as an extend, a draft extend does not."""
        return self in ("extend", "mixed", "target_verify")

    def is_decode(self) -> bool:
        return self == "decode"

    def is_decode_or_idle(self) -> bool:
        return self in ("decode", "idle")

    def is_target_verify(self) -> bool:
        return self == "target_verify"

    def is_draft_extend_v2(self) -> bool:
        return self == "draft_extend"


def plan_input(step: Step):
    """Return the published plan input of a forward.

    Prefix and extend lengths are the engine's own. Where the forward was fed the positions that go with them, the
    published derivation, which takes a decode's prefix from its position, must come to the same.
    """
    import torch
    from sglang.srt.kv_canary.plan_input import PlanInput

    given = PlanInput(
        req_pool_indices=torch.from_numpy(step.rows),
        prefix_lens=torch.from_numpy(step.prefix_lens),
        extend_seq_lens=torch.from_numpy(step.extend_lens),
        req_to_verify_expected_tokens_valid_lens=torch.from_numpy(step.truth_lens),
    )
    first = np.cumsum(step.extend_lens) - step.extend_lens
    if (step.positions[first] == step.prefix_lens).all():
        derived = PlanInput.allocate(bs_capacity=step.rows.size, device=torch.device("cpu"))
        derived.fill_from_forward_batch(
            forward_batch=SimpleNamespace(
                forward_mode=Mode(step.mode),
                req_pool_indices=given.req_pool_indices,
                positions=torch.from_numpy(step.positions),
                seq_lens=torch.from_numpy(step.prefix_lens + step.extend_lens * (step.mode != "target_verify")),
                extend_prefix_lens=given.prefix_lens,
                extend_seq_lens=given.extend_seq_lens,
                spec_info=SimpleNamespace(draft_token_num=int(step.extend_lens[0])),
                req_all_ids_lens=given.req_to_verify_expected_tokens_valid_lens,
            )
        )
        for name in ("req_pool_indices", "prefix_lens", "extend_seq_lens", "req_to_verify_expected_tokens_valid_lens"):
            assert torch.equal(getattr(derived, name), getattr(given, name)), (step.mode, name)
    return given
