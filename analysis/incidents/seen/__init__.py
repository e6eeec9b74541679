"""What is seen of a cluster of damage, coded once: single observations, the slot's evidence, the branch that follows, and traits."""
