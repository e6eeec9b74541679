"""The token oracle: a sampler whose every token is a hash of request and position."""
