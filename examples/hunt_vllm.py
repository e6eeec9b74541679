"""A script for `kvcanary hunt --script`: does the workload that KVCANARY_WORKLOAD names, with vLLM in one process.

`kvcanary hunt --script -- python examples/hunt_vllm.py MODEL [OPTIONS]` makes weights up (`load_format="dummy"`). OPTIONS is what LLM
takes, as JSON, and `"adapters": {"name": "folder"}`. A server (`vllm serve`) needs no script; here scheduler and model are in one
process, so that allocations, evictions and aborts are recorded on a CPU too (VLLM_ENABLE_V1_MULTIPROCESSING=1 has them apart). The
fields of a request are those of SamplingParams, `structured_outputs`, and `priority`.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM, SamplingParams  # behind the variable
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams


def main(model: str, *, adapters: dict[str, str] | None = None, **more: object) -> None:
    """Run the requests at their times; a client that leaves aborts its request."""
    with Path(os.environ["KVCANARY_WORKLOAD"]).open() as file:
        steps = [json.loads(line) for line in file]
    small = {"load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 256}
    small |= {"max_num_batched_tokens": 48, "max_num_seqs": 6, "num_gpu_blocks_override": 12}
    if adapters:
        small |= {"enable_lora": True, "max_loras": len(adapters), "max_cpu_loras": len(adapters)}
    llm = LLM(model, **{**small, **more})
    engine = llm.llm_engine
    loras = {name: LoRARequest(name, n, folder) for n, (name, folder) in enumerate((adapters or {}).items(), start=1)}
    texts: dict[str, list[int]] = {}  # what was asked and answered, by request
    leaves: dict[str, int] = {}

    def go_on(until: float, *names: str) -> None:
        """Run the engine until that time, and until those requests have their answers."""
        while time.monotonic() < until or set(names) & leaves.keys():
            if not engine.has_unfinished_requests():
                time.sleep(0.001)
                continue
            for output in engine.step():
                name, tokens = output.request_id, list(output.outputs[0].token_ids)
                if output.finished:
                    texts[name] += tokens
                    leaves.pop(name, None)
                elif 0 <= leaves.get(name, -1) <= len(tokens):
                    engine.abort_request([name])
                    del leaves[name]

    began = time.monotonic()
    for step in steps:
        go_on(began + step.get("at_ms", 0) / 1000)
        if step["do"] == "ask":
            before = step.get("continues", "")
            go_on(0, before)
            name = step["name"]
            texts[name] = [*texts.get(before, []), *step["prompt"]]
            leaves[name] = step.get("abort_after", -1)
            fields = dict(step.get("fields", {}))
            priority = fields.pop("priority", 0)
            if grammar := fields.pop("structured_outputs", None):
                fields["structured_outputs"] = StructuredOutputsParams(**grammar)
            greedy = {"max_tokens": step["max_tokens"], "temperature": 0, "ignore_eos": True, "detokenize": False}
            try:
                sampling = SamplingParams(**{**greedy, **fields})
            except ValueError as error:  # what does not go together, as a server refuses it
                print(f"{name} is refused: {error}", flush=True)
                leaves.pop(name)
                continue
            asked = {"prompt_token_ids": texts[name]} | ({"cache_salt": step["salt"]} if step.get("salt") else {})
            engine.add_request(name, asked, sampling, lora_request=loras.get(step.get("adapter")), priority=priority)
        elif step["do"] in ("wait", "flush"):
            go_on(0, *leaves)
            if step["do"] == "flush":
                llm.reset_prefix_cache()
            began = time.monotonic()
    go_on(0, *leaves)
    engine.engine_core.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"))
