"""Parts that are not trained: `freeze`, `cpu_only`."""
