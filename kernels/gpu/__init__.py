"""The Triton forms of the kernels: torch tensors in, torch tensors out. Whoever imports a module of these loads Triton."""
