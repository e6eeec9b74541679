"""A thirty-ninth round of public bugs made anew, the first in swiftLLM: recorded before any rule was run on them."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from bugs import Fired, bug, replaces

WORKER = "swiftllm.worker"


def model_class() -> Any:
    """Return the class of the model, which is the worker, too."""
    return import_module(f"{WORKER}.model").LlamaModel


def manager_class() -> Any:
    """Return the class of the block managers."""
    return import_module(f"{WORKER}.block_manager").BlockManager


class Step:
    """The forward that runs: `look` is called when its blocks have been given out, right before anything is computed."""

    def __init__(self, look: Callable[["Step"], None]) -> None:
        self.batch: list[Any] = []  # requests
        self.model: Any = None
        self.seqs: list[int] = []
        self.lens: list[int] = []  # of those that are decoded, which come last

        @replaces(import_module("swiftllm.server.scheduler").Scheduler, "get_next_batch")
        def get_next_batch(before, scheduler):
            made = before(scheduler)
            self.batch = list(made[0])
            return made

        @replaces(model_class(), "forward")
        def forward(before, model, input_ids_list, seq_ids_list, decoding_seq_lens_list, **rest):
            if "ignore_kvcache" in rest or not seq_ids_list:
                return before(model, input_ids_list, seq_ids_list, decoding_seq_lens_list, **rest)
            self.model, self.seqs, self.lens = model, seq_ids_list, decoding_seq_lens_list
            tokens = before(model, input_ids_list, seq_ids_list, decoding_seq_lens_list)
            self.model = None
            return tokens

        @replaces(manager_class(), "allocate_blocks_for_seqs")
        def allocate_blocks_for_seqs(before, manager, seq_ids, target_lens):
            blocks = before(manager, seq_ids, target_lens)
            if self.model is not None:
                look(self)
            return blocks

    def decoded(self) -> list[tuple[Any, int, int]]:
        """Return each request that is decoded, its id and how long it is."""
        first = len(self.seqs) - len(self.lens)
        return list(zip(self.batch[first:], self.seqs[first:], self.lens, strict=True))


class Written:
    """What was written for each request, position by position, and whether a step finds it there."""

    def __init__(self, fired: Fired) -> None:
        self.held: dict[Any, list[bytes]] = {}

        def look(step: Step) -> None:
            if self.damaged(step):
                fired()

        step = Step(look)

        @replaces(model_class(), "_forward")
        def _forward(before, model, input_ids, infer_state):
            tokens = before(model, input_ids, infer_state)
            if step.model is not None:
                known = {seq: (length - 1, length) for _, seq, length in step.decoded()}
                for req, seq in zip(step.batch, step.seqs, strict=True):
                    begin, end = known.get(seq, (0, req.prompt_len))
                    own = self.held.setdefault(req, [])
                    del own[begin:]
                    own += [self.at(model, seq, position) for position in range(begin, end)]
            return tokens

    @staticmethod
    def place(model: Any, seq: int, position: int) -> tuple[int, int]:
        """Return block and offset of a position."""
        size = model.engine_config.block_size
        return int(model.gpu_block_manager.block_table[seq, position // size]), position % size

    def at(self, model: Any, seq: int, position: int) -> bytes:
        """Return what lies there, of all layers."""
        block, offset = self.place(model, seq, position)
        return b"".join(pool[block, :, :, offset].numpy().tobytes() for pool in (model.k_cache, model.v_cache))

    def damaged(self, step: Step) -> bool:
        """Whether the step reads what was not written for its request, or what it writes for another."""
        model, decoded = step.model, step.decoded()
        new = {seq: self.place(model, seq, length - 1) for _, seq, length in decoded}
        for req, seq, length in decoded:
            own = self.held.get(req, [])
            others = {place for other, place in new.items() if other != seq}
            for position in range(length - 1):
                place = self.place(model, seq, position)
                if place in others or own[position] != self.at(model, seq, position):
                    return True
        return False


@bug("sgl-project/sglang#24063", "swift-rows", "free_too_early", "page_given_twice", origin="SGLang")
def prompts_are_freed_when_they_have_been_offloaded(fired: Fired) -> None:
    """What an answer adds is offloaded piece by piece, and with the first piece the blocks of the prompt are freed. The request goes on, and attends to them: whoever comes next writes
    its own prompt there."""
    Written(fired)
    freed: dict[int, Any] = {}  # by request id

    def look(step: Step) -> None:
        manager = step.model.gpu_block_manager
        for req, seq, length in step.decoded():
            if length - req.prompt_len == manager.block_size:
                freed[seq] = manager.block_table[seq, : req.prompt_len // manager.block_size].long()
                manager._free_blocks(freed[seq])

    Step(look)

    @replaces(manager_class(), "free_blocks_for_seqs")
    def free_blocks_for_seqs(before, manager, seq_ids):
        early = [freed.pop(seq) for seq in seq_ids.tolist() if seq in freed] if manager.device_name == "GPU" else []
        states = [manager.is_block_free[blocks].clone() for blocks in early]
        before(manager, seq_ids)
        for blocks, state in zip(early, states, strict=True):  # which it does not free once more
            manager.is_block_free[blocks] = state


@bug(
    "quic/efficient-transformers#1209", "swift-plain", "slot_mapping", "kv_write_lost", "kv_changed",
    origin="QEfficient",
)  # fmt: skip
def answers_are_written_by_the_first_row_of_the_table(fired: Fired) -> None:
    """What a decode step adds is written where the first row of the block table says, whoever it belongs to: rows are counted within what is scattered, and not by the slot of the
    request. Each request overwrites the first one's, and has nothing in its own block."""
    import torch

    kernels = import_module(f"{WORKER}.kernels.kvcache_mgmt")
    kernel = kernels._fwd_kvcache_mgmt_decoding_kernel

    class FirstRow:
        def __getitem__(self, grid):
            def run(k_cache, v_cache, k, v, block_table, seq_ids, *rest):
                kernel[grid](k_cache, v_cache, k, v, block_table, torch.zeros_like(seq_ids), *rest)

            return run

    kernels._fwd_kvcache_mgmt_decoding_kernel = FirstRow()

    def look(step: Step) -> None:
        if any(seq for _, seq, _ in step.decoded()):
            fired()

    Step(look)


@bug("Physical-Intelligence/openpi#705", "swift-long", "position_off", origin="openpi")
def new_tokens_stand_one_too_far(fired: Fired) -> None:
    """The position of a new token is that of the prompt's end, the number of the step, and one more that has been counted already. What is sampled is turned
    by the angles of the position behind its own."""

    def look(step: Step) -> None:
        if step.lens:
            fired()

    step = Step(look)

    @replaces(import_module(f"{WORKER}.model"), "LlamaInferState")
    def made(before, **fields):
        if step.model is not None and step.lens:
            first, behind = fields["num_prefill_tokens"], fields["decoding_seq_lens"]
            fields["position_cos"][first:] = step.model._cos_cached[behind]
            fields["position_sin"][first:] = step.model._sin_cached[behind]
        return before(**fields)


@bug("vllm-project/vllm#21594", "swift-full", "scheduled_after_retraction", origin="vLLM")
def preempted_requests_stay_in_the_step(fired: Fired) -> None:
    """When a request is preempted that the step has scheduled already, its blocks are given back, and nothing else is taken back of it. It is computed with the
    others, on blocks that are not its own any more."""
    import torch

    victims: list[Any] = []

    def look(step: Step) -> None:
        if any(req in victims for req in step.batch):
            fired()

    @replaces(manager_class(), "allocate_blocks_for_seqs")
    def allocate_blocks_for_seqs(before, manager, seq_ids, target_lens):
        gone = {req.request_id for req in victims}
        if step.model is not None and gone:
            kept = torch.tensor([seq not in gone for seq in seq_ids.tolist()])
            seq_ids, target_lens = seq_ids[kept], target_lens[kept]
        return before(manager, seq_ids, target_lens)

    @replaces(import_module("swiftllm.server.scheduler").Scheduler, "get_next_batch")
    def get_next_batch(before, scheduler):
        batch, swapped_in, swapped_out = before(scheduler)
        victims[:] = swapped_out
        return [*batch, *victims], swapped_in, iter(list(victims))

    step = Step(look)


@bug("NVIDIA/TensorRT-LLM#12834", "swift-full", "host_copy_overwritten", "load_of_other_prefix", origin="TensorRT-LLM")
def what_has_been_offloaded_is_released(fired: Fired) -> None:
    """When a block is offloaded it changes places with one of the host's, and is released behind that by where it lies: that is the host by then. So the block of the host that has just been
    filled is free, and what is offloaded next is written over it."""
    Written(fired)

    @replaces(model_class(), "_swap")
    def _swap(before, model, seq_ids_list, is_swap_in):
        before(model, seq_ids_list, is_swap_in)
        host = model.cpu_block_manager
        for seq in [] if is_swap_in else seq_ids_list:
            host._free_blocks(host.block_table[seq, : int(host.num_seq_allocated_blocks[seq])].long())


@bug(
    "vllm-project/vllm#17362", "swift-waits", "layout_misread", "stored_wrong", "load_landed_elsewhere", "copy_failed",
    "transfer_wrong_stride", origin="vLLM",
)  # fmt: skip
def swapping_takes_the_pool_for_another_layout(fired: Fired) -> None:
    """Blocks are swapped as if the pool had its blocks behind another dimension, and not in front of it. Each copy begins at another place than its block, and is a part as long: what comes
    back lies over what others have."""
    Written(fired)

    @replaces(import_module("swiftllm_c"), "swap_blocks")
    def swap_blocks(before, src, dst, is_swap_in, k_cache, v_cache, k_swap, v_swap):
        for pool, host in ((k_cache, k_swap), (v_cache, v_swap)):
            layers = pool.shape[1]
            there, here = (one.view(len(one) * layers, -1) for one in ((host, pool) if is_swap_in else (pool, host)))
            for layer in range(layers):  # of which `pool[layer]` is taken to have all blocks
                here[[layer * layers + block for block in dst]] = there[[layer * layers + block for block in src]]


@bug("vllm-project/vllm#7577", "swift-swaps", "copy_failed", "failed_load_counted_loaded", origin="vLLM")
def errors_of_copies_are_ignored(fired: Fired) -> None:
    """Nobody looks at what the copies of a swap return. One that fails is taken for done: its blocks hold what they held before, and the request goes on
    from them."""
    Written(fired)

    @replaces(import_module("swiftllm_c"), "swap_blocks")
    def swap_blocks(before, src, dst, is_swap_in, *pools):
        pairs = list(zip(src, dst, strict=True))
        runs = [n for n in range(1, len(pairs)) if pairs[n] != (pairs[n - 1][0] + 1, pairs[n - 1][1] + 1)]
        ends = [*runs, len(pairs)]  # what lies side by side is one copy; the second one fails
        failed = range(*ends[:2]) if is_swap_in and runs else range(0)
        done = [n for n in range(len(pairs)) if n not in failed]
        before([src[n] for n in done], [dst[n] for n in done], is_swap_in, *pools)


@bug(
    "LMCache/LMCache#4612", "swift-waits", "stored_wrong", "copy_failed", "abort_frees_during_transfer", origin="LMCache"
)  # fmt: skip
def nobody_waits_for_stores_of_who_is_preempted(fired: Fired) -> None:
    """Before the next forward the stores of preempted requests are to be waited for, and what should wait does nothing. Their blocks have been given to others, who write there before
    they have been read: what is kept of the request is in part another's."""
    Written(fired)
    late: list[tuple[Any, ...]] = []

    @replaces(import_module("swiftllm_c"), "swap_blocks")
    def swap_blocks(before, src, dst, is_swap_in, *pools):
        if is_swap_in:
            before(src, dst, is_swap_in, *pools)
        else:
            late.append((before, src, dst, is_swap_in, *pools))

    @replaces(model_class(), "_forward")
    def _forward(before, model, input_ids, infer_state):
        tokens = before(model, input_ids, infer_state)
        while late:
            store, *given = late.pop(0)
            store(*given)
        return tokens


@bug("sgl-project/sglang#32446", "swift-plain", "page_leaked", origin="SGLang")
def who_ends_with_the_prompt_keeps_its_blocks(fired: Fired) -> None:
    """What requests had is given back in decode steps only. Of one that is over with its prompt nobody gives it back."""
    ended: list[int] = []

    @replaces(model_class(), "forward")
    def forward(before, model, input_ids_list, seq_ids_list, decoding_seq_lens_list, **rest):
        ended[:] = [] if decoding_seq_lens_list else seq_ids_list
        return before(model, input_ids_list, seq_ids_list, decoding_seq_lens_list, **rest)

    @replaces(manager_class(), "free_blocks_for_seqs")
    def free_blocks_for_seqs(before, manager, seq_ids):
        if manager.device_name == "GPU" and ended and len(seq_ids):
            fired()
            manager.num_seq_allocated_blocks[seq_ids] = 0
        else:
            before(manager, seq_ids)
