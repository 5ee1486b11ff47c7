"""Data that is read in order, shard by shard: lanes, `Pack`, `Buckets`."""
