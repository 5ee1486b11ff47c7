"""`ElasticLoader`, and a step: its microbatches, its backward passes, what is recorded of it."""
