"""Tensors in, tensors out: hashing, plan, verify, write, scatter, oracle, gather and change finding."""
