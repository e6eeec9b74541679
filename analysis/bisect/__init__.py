"""Finding the engine version that brought a fault: over saved traces, or by recording one for each version."""
