"""transformers: renamed and fused keys, and quantized files."""
