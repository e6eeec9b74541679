"""A script for `kvcanary hunt --script`: does the workload that KVCANARY_WORKLOAD names, with transformers' continuous batching.

`kvcanary hunt --script -- python examples/hunt_transformers.py` runs a tiny random model, so nothing is downloaded. What
ContinuousBatchingConfig takes may follow as JSON, with `attention`, the model's implementation, `sequences`
(`num_return_sequences`: an answer is forked) and `model`, a folder whose config.json is made up with random weights. Needs `pip install kvcanary torch 'transformers>=5.23,<6' accelerate psutil`.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from kvcanary.recorder.engines.transformers import attach_from_environment
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LlamaConfig


def main(attention: str = "sdpa", sequences: int = 1, model: str = "", **more: object) -> None:
    """Run the requests at their times; a client that leaves cancels its request."""
    with Path(os.environ["KVCANARY_WORKLOAD"]).open() as file:
        steps = [json.loads(line) for line in file]
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=512, **shape, **heads, max_position_embeddings=512, dtype="float32")
    if model:
        config = AutoConfig.from_pretrained(model, dtype="float32")
    random = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    attach_from_environment()
    small = {"page_size": 8, "num_blocks": 48, "max_batch_tokens": 64, "use_cuda_graph": False}
    batching = ContinuousBatchingConfig(**{**small, **more})
    wanted = GenerationConfig(do_sample=sequences > 1, eos_token_id=-1, num_return_sequences=sequences)
    texts: dict[str, list[int]] = {}  # what was asked and answered, by request
    leaving: dict[str, int] = {}
    with random.continuous_batching_context_manager(
        generation_config=wanted, continuous_batching_config=batching
    ) as manager:

        def gather(*, until: float = 0.0, names: frozenset[str] = frozenset()) -> None:
            """Take answers until that time, and until those requests have theirs."""
            while (left := until - time.monotonic()) > 0 or names & asked:
                result = manager.get_result(timeout=min(max(left, 0.01), 0.05))
                if result is None:
                    if not manager.is_running():
                        raise SystemExit("the engine has ended")
                    continue
                name = result.request_id
                if len(result.generated_tokens) >= leaving.get(name, 1 << 30):
                    manager.cancel_request(name)
                    asked.discard(name)
                if result.is_finished():
                    texts.setdefault(name, []).extend(result.generated_tokens)
                    asked.discard(name)

        asked: set[str] = set()
        began = time.monotonic()
        for step in steps:
            gather(until=began + step.get("at_ms", 0) / 1000)
            if step["do"] == "ask":
                before = step.get("continues", "")
                gather(names=frozenset([before]))
                name = step["name"]
                texts[name] = [*texts.get(before, []), *step["prompt"]]
                leaves = step.get("abort_after", -1)
                asked.add(name)
                if leaves >= 0:
                    leaving[name] = max(1, leaves)
                else:
                    asked |= {f"{name}__child#{n}" for n in range(sequences - 1)}
                manager.add_request(
                    texts[name],
                    request_id=name,
                    max_new_tokens=step["max_tokens"],
                    streaming=leaves >= 0,
                    **step.get("fields", {}),
                )
            elif step["do"] in ("wait", "flush"):
                gather(names=frozenset(asked))
                began = time.monotonic()
        gather(names=frozenset(asked))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1] if len(sys.argv) > 1 else "{}"))
