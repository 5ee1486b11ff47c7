"""transformers: renamed and fused keys, quantized files."""
