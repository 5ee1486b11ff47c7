"""Bytes at rest: local files, object stores, the reader, checksums.

Everything that reads or writes enters this wing. It may import `tensors`, and knows no processes.
"""
