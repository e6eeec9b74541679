"""What SGLang's attention is given and what comes out of it: windows, positions, outputs."""
