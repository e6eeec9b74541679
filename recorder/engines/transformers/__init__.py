"""Adapter for Hugging Face transformers' continuous batching: `attach`, and every `generate_batch` is recorded.

    with attach("trace.arrow"):
        model.generate_batch(inputs, ...)

Known to work with transformers 5.18 to 5.24.
"""

from .attachment import TransformersAttachment, attach, attach_from_environment

__all__ = ["TransformersAttachment", "attach", "attach_from_environment"]
