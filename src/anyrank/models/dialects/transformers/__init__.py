"""transformers: renamed and fused keys, quantised files."""
