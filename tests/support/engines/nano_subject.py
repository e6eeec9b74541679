"""The engine of `nano.py` as `kvcanary check-adapter` drives it."""

from pathlib import Path
from typing import Any, ClassVar

from kvcanary.recorder.capture.recorder import Recorder

from .nano import BLOCK, VOCAB, Llm, attach


class Engine:
    vocab_size, max_len = VOCAB, 40
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, trace: Path) -> None:
        self.llm = Llm()
        self.llm.model_runner.on_inputs = lambda inputs: self.on_inputs({**inputs, "block_size": BLOCK})
        self.recorder: Recorder = attach(self.llm, trace, **self.options)

    def on_inputs(self, inputs: dict[str, Any]) -> None: ...

    def add(self, name: str, prompt: list[int], new_tokens: int) -> None:
        self.llm.add_request(prompt, new_tokens)

    def step(self) -> bool:
        return self.llm.step()

    def close(self) -> None:
        self.recorder.close()

    def fault_freed_too_early(self) -> bool:
        for seq in self.llm.scheduler.running:
            if len(seq.block_table) > 1 and len(seq) < seq.end - 1:
                self.llm.scheduler.block_manager.free_block_ids.append(seq.block_table[0])
                return True
        return False
