"""A fifty-second round of public bugs made anew in swiftLLM on the CPU: recorded before any rule was run on them."""

from importlib import import_module

import torch
from bugs import Fired, bug, replaces

from .round_39 import WORKER, Step, Written, model_class


@bug(
    "microsoft/onnxruntime#28442",
    "swift-grows",
    "bad_values_written",
    origin="ONNX Runtime",
    late="not found: a layer that has had rows of zeros from the start may be one that not all tokens write",
)
def squares_of_the_residual_are_summed_up_in_half_precision(fired: Fired) -> None:
    """The kernel that adds to the residual and norms it sums up squares in 16 bits. The residual grows from layer to layer, and behind some
    of them the sum is more than 16 bits hold for some tokens: it is infinite, and such a token's row is divided by it, which
    leaves nothing to make its keys and values of."""
    kernels = import_module(f"{WORKER}.kernels.rmsnorm")
    overflows, asked = [False], [[]]  # what is looked for in a step that is computed in advance, and the step's tokens

    class Half:
        def __getitem__(self, grid):
            def run(x, residual, weight, eps, size):
                x += residual
                residual.copy_(x)
                mean = ((x / size) * x).cumsum(1)[:, -1]  # in the type that it has
                overflows[0] |= bool(mean.isinf().any())
                x.copy_(x * torch.rsqrt(mean + eps)[:, None] * weight)

            return run

    kernels._fwd_fused_add_rmsnorm = Half()

    def look(step: Step) -> None:
        """Nothing: the step's inputs are not made yet."""

    step = Step(look)

    @replaces(model_class(), "forward")
    def forward(before, model, input_ids_list, *given, **rest):
        asked[0] = [token for tokens in input_ids_list for token in tokens]
        return before(model, input_ids_list, *given, **rest)

    @replaces(import_module(f"{WORKER}.model"), "LlamaInferState")
    def made(before, **fields):
        state, model = before(**fields), step.model
        if model is not None:
            pools = [(pool, pool.clone()) for pool in (model.k_cache, model.v_cache)]
            overflows[0] = False
            type(model)._forward(model, torch.tensor(asked[0], dtype=torch.int32), state)
            for pool, kept in pools:
                pool.copy_(kept)
            if overflows[0]:
                fired()
        return state


@bug("vllm-project/vllm#54272", "swift-spans", "transfer_wrong_stride", "host_copy_overwritten", origin="vLLM")
def parts_of_blocks_are_each_copied_at_the_length_of_a_block(fired: Fired) -> None:
    """Blocks are copied in parts, one for each layer here, and each part's place is right. The length that goes with each is that of the
    whole block: but for the first part of a block each copy goes on into the block behind it, and what lies behind the
    source is written over what another request has there, on the device or on the host."""
    Written(fired)

    @replaces(import_module("swiftllm_c"), "swap_blocks")
    def swap_blocks(before, src, dst, is_swap_in, k_cache, v_cache, k_swap, v_swap):
        for pool, host in ((k_cache, k_swap), (v_cache, v_swap)):
            parts = pool.shape[1]
            there, here = (one.view(len(one) * parts, -1) for one in ((host, pool) if is_swap_in else (pool, host)))
            for source, target in zip(src, dst, strict=True):
                for part in range(parts):
                    begin, end = source * parts + part, target * parts + part
                    length = min(parts, len(there) - begin, len(here) - end)  # no further than to the end of either
                    here[end : end + length] = there[begin : begin + length]


@bug("vllm-project/vllm-ascend#10245", "swift-keeps", "req_to_token", origin="vLLM Ascend")
def step_that_keeps_the_engine_warm_fills_in_the_table(fired: Fired) -> None:
    """Between the steps of requests one of nobody's tokens is computed, so that the engine stays warm. It fills in the same block table,
    from its first row on, and nobody takes that back: the first entry of each running request's row is that step's block
    from then on."""
    import __main__ as engine

    lost: set[int] = set()  # ids of requests whose first block is not in their rows any more

    @replaces(engine, "keep_warm")
    def keep_warm(before, model, rows):
        manager = model.gpu_block_manager
        with torch.inference_mode():
            has = manager.num_seq_allocated_blocks[:rows] > 0
            lost.update(torch.nonzero(has & (manager.block_table[:rows, 0] != 0)).flatten().tolist())
            manager.block_table[:rows, 0] = 0
        before(model, rows)

    def look(step: Step) -> None:
        if any(seq in lost for _, seq, _ in step.decoded()):
            fired()

    Step(look)
