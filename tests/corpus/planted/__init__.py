"""Public bugs made anew, by the engine that they are planted into."""
