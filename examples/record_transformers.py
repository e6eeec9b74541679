"""Record Hugging Face transformers' continuous batching, then replay what was recorded.

`python examples/record_transformers.py [TRACE]` runs a tiny random model, so nothing is downloaded; put your own model in its
place. Needs `pip install kvcanary torch 'transformers>=5.23,<6' accelerate psutil`.
"""

import sys
import tempfile
from pathlib import Path

import torch
from kvcanary import replay
from kvcanary.recorder.engines.transformers import attach
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LlamaConfig

trace = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()) / "trace.arrow"

torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(
    LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    ),
    attn_implementation="sdpa",
)
prompts = [[5, 6, 7, 8] * 6, [9, 10, 11], [5, 6, 7, 8] * 6 + [3]]

with attach(trace):
    answers = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=16, do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=8, num_blocks=64, max_batch_tokens=48, use_cuda_graph=False
        ),
    )
print(f"{sum(len(answer.generated_tokens) for answer in answers.values())} tokens generated, recorded in {trace}")

# As a command: kvcanary-replay TRACE
summary = replay(trace)
print(f"{summary.verdict.value}: {summary.forwards} forwards, {summary.violations} violations")
