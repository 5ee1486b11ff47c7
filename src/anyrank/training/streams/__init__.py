"""Data that is read in order, shard by shard: lanes, `Pack`, `Buckets`.

- *shard*: an argument of the user's `read`, which returns its rows; a *source* has several.
- *piece*: some neighboring rows of a shard that are read at a time, under their own generators.
- *sample*: what the transform makes of rows; without one, the row. A *unit* of it is a token.
- *lane*: a reader of some shards, one after the other. A *block* has the samples of a microbatch.
- *deal*: the lanes of an epoch, and which lane each microbatch reads (the *table*).
- *pass*: one reading of a source's shards, by its `pass_id`; a mixture's source may have several.
- *opening*: the shards and the state of a lane, from which any process can continue it.
- *look*: the number of blocks that a lane reads ahead, to know how many it has left.
"""
