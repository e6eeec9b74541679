"""The canary's ops, one folder each: plain loops that define it, and the Triton form of the same."""
