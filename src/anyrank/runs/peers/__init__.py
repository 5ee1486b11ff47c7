"""Snapshots in the memory of other machines: `peers=`."""
