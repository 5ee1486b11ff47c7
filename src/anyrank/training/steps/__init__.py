"""`ElasticLoader`, and a step: its microbatches, its backward passes, and its record."""
