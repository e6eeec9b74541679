"""What a checkpoint says that the first layer of the engine's model writes, held against what it wrote."""
