"""A thirty-third round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from typing import Any

from bugs import Fired, bug, replaces


@bug(
    "vllm-project/vllm#48974",
    "llama-lora-prompts",
    "computed_with_other_weights",
    late="it shows when a token comes again that was computed otherwise",
)
def prompts_go_through_the_layer_without_its_adapter(fired: Fired) -> None:
    """The way that prompts take has kept the projection from before adapters were put around it, and calls that. Answers are computed with the adapter, token by token; all of the prompt that stands before them has the keys and values of
    the base model."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    of_prompts: list[tuple[int, int]] = []  # runs of tokens of this step

    @replaces(GPUModelRunner, "_prepare_inputs")
    def _prepare_inputs(before, runner, output, *args, **kwargs):
        made, begin = before(runner, output, *args, **kwargs), 0
        of_prompts.clear()
        for row, name in enumerate(runner.input_batch.req_ids):
            end = begin + output.num_scheduled_tokens[name]
            if end - begin > 1 and runner.input_batch.request_lora_mapping[row]:
                of_prompts.append((begin, end))
            begin = end
        layers = [m for m in runner.model.modules() if isinstance(m, BaseLinearLayerWithLoRA)]
        if of_prompts and any(part.any() for layer in layers for part in layer.lora_b_stacked):
            fired()
        return made

    @replaces(BaseLinearLayerWithLoRA, "apply")
    def apply(before, layer, x, bias=None):
        made = before(layer, x, bias)
        if of_prompts:
            base = layer._get_quant_method().apply(layer.base_layer, x, bias)
            for begin, end in of_prompts:
                made[begin:end] = base[begin:end]
        return made


@bug("ovg-project/kvcached#391", "qwen-loads-split", "layout_misread", origin="kvcached")
def halves_are_loaded_as_if_they_were_by_token(fired: Fired) -> None:
    """What is sent of a block is all of its keys and behind them all of its values. Who receives it goes by the shape that the cache says it has, in which a token's key and value stand together, and fills it from front to
    back: the front half of the block is all keys, the other half all values, and each stands at another token's place."""
    import host_connector
    import torch

    changed: set = set()  # keys of what is another when it has been read that way

    def misread(rows: Any) -> Any:
        keys, values = rows.chunk(2, dim=-1)
        return torch.cat([keys.flatten(), values.flatten()]).view(rows.shape)

    @replaces(host_connector.HostConnector, "wait_for_save")
    def wait_for_save(before, connector):
        before(connector)
        for job in connector._get_connector_metadata().stores:
            for gid, block, key in job.blocks:
                if any((misread(rows) != rows).any() for _, rows in connector._blocks_of(gid, block)):
                    changed.add(key)

    @replaces(host_connector.HostConnector, "_load")
    def _load(before, connector, job):
        before(connector, job)
        for gid, block, _ in job.blocks:
            for _, rows in connector._blocks_of(gid, block):
                rows.copy_(misread(rows))

    @replaces(host_connector.HostConnector, "build_connector_meta")
    def build_connector_meta(before, connector, output):
        made = before(connector, output)
        if any(changed & {key for _, _, key in job.blocks} for job in made.loads):
            fired()
        return made


@bug(
    "vllm-project/vllm#52234",
    "llama-loads-leases",
    "host_copy_overwritten",
    "load_of_other_prefix",
)
def reference_outlives_the_blocks_it_names(fired: Fired) -> None:
    """Who has computed a prompt keeps its blocks for others to load, in as many places as there are, and gives a place to the next prompt when it needs it. A reference to what was there before is still honoured: the load ends
    well, and brings the blocks of another prompt."""
    import host_connector

    places: dict[int, tuple] = {}  # place -> key that has it
    stale: set = set()  # keys
    count = [0]

    @replaces(host_connector.HostConnector, "wait_for_save")
    def wait_for_save(before, connector):
        before(connector)
        for job in connector._get_connector_metadata().stores:
            for gid, block, key in job.blocks:
                place, count[0] = count[0] % PLACES, count[0] + 1
                gone, places[place] = places.get(place), key
                stale.discard(key)
                if gone is not None:
                    for name, _ in connector._blocks_of(gid, block):
                        old, new = connector._store[name, gone], connector._store[name, key]
                        if (old != new).any():
                            stale.add(gone)
                        connector._store[name, gone] = new

    @replaces(host_connector.HostConnector, "build_connector_meta")
    def build_connector_meta(before, connector, output):
        made = before(connector, output)
        if any(stale & {key for _, _, key in job.blocks} for job in made.loads):
            fired()
        return made


PLACES = 7  # blocks that are kept for others


@bug("invergent-ai/surogate#124", "qwen-admits", "future_map_overrun", origin="surogate")
def admission_fills_the_buffer_that_a_launched_step_reads(fired: Fired) -> None:
    """Tokens go to the device from one buffer of the host, and the copy runs beside the host. When a request is taken in, the host fills the buffer anew before the copy of the step that is under way has read it: in that step
    those that are being answered are fed tokens of the new prompt."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    @replaces(GPUModelRunner, "_prepare_input_ids")
    def _prepare_input_ids(before, runner, output, num_reqs, total, ends):
        before(runner, output, num_reqs, total, ends)
        taken_in = [token for new in output.scheduled_new_reqs for token in new.prompt_token_ids]
        if not taken_in:
            return
        for row, name in enumerate(runner.input_batch.req_ids[:num_reqs]):
            place = int(ends[row]) - 1
            if output.num_scheduled_tokens[name] == 1 and int(runner.input_ids.gpu[place]) != taken_in[row]:
                fired()
                runner.input_ids.gpu[place] = taken_in[row]
