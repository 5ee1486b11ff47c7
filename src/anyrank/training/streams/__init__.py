"""Data that is read in order, in shards: lanes, `Pack`, `Buckets`."""
