"""`inspect`, `verify` and `diff`: what a checkpoint holds, whether it is whole, what differs."""
