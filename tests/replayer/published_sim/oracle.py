"""What the published token oracle expects a forward to be fed."""

from types import SimpleNamespace

import numpy as np

from .step import Mode, Step


def published_oracle(vocab_size: int):
    """Return the published manager over the published hash oracle."""
    from sglang.srt.kv_canary.token_oracle.oracle import HashOracle
    from sglang.srt.kv_canary.token_oracle.oracle_manager import TokenOracleManager

    return TokenOracleManager(oracle=HashOracle(vocab_size=vocab_size))


def expected_inputs(manager, step: Step, *, token_offset: int):
    """Return what each token of a forward is compared with, None where the published canary asserts nothing.

    Decodes, extends and verifies go through the published `fill_expected_inputs`. A draft extend goes to the published
    oracle token by token: `fill_expected_inputs` wants as many tokens of each request, and asks for the token of the
    position, where a draft's input at position p is the token of p + 1. What is still prompt is taken as fed.
    """
    import torch
    from sglang.srt.kv_canary.expected_inputs import ExpectedInputs
    from sglang.srt.kv_canary.token_oracle.oracle_manager import select_generalized_req_ids

    mode = Mode(step.mode)
    if mode.is_decode() and token_offset:
        return None  # an EAGLE draft's own guesses
    ids, rooms = torch.from_numpy(step.request_ids), torch.from_numpy(step.rooms)
    expected = ExpectedInputs.allocate(capacity=step.positions.size, device=torch.device("cpu"))
    expected.tokens.fill_(-7)
    expected.positions.fill_(-7)
    if mode.is_draft_extend_v2():
        per_row = select_generalized_req_ids(vanilla_req_ids=ids, bootstrap_room_ids_int=rooms)
        at = step.positions + token_offset
        asked = manager.oracle.expected_tokens(
            generalized_req_ids=per_row.repeat_interleave(torch.from_numpy(step.extend_lens)),
            positions=torch.from_numpy(at),
        ).numpy()
        generated = at >= np.repeat(step.prompt_lens, step.extend_lens)
        expected.tokens.numpy()[:] = np.where(generated, asked, step.input_ids)
        expected.positions.numpy()[:] = step.positions
        return expected
    manager.fill_expected_inputs(
        forward_batch=SimpleNamespace(
            forward_mode=mode,
            positions=torch.from_numpy(step.positions),
            input_ids=torch.from_numpy(step.input_ids),
            rids_int=ids,
            bootstrap_room_ids_int=rooms,
            extend_seq_lens=torch.from_numpy(step.extend_lens),
            spec_info=SimpleNamespace(draft_token_num=int(step.extend_lens[0])),
        ),
        expected_inputs_out=expected,
    )
    return expected
