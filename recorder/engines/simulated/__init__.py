"""A deterministic inference engine without a model, which records through the same Recorder as a real one."""
