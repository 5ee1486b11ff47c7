"""Bytes at rest: local files, object stores, the reader, checksums.

Whatever reads or writes enters it. It may import `tensors`, and knows no processes.
"""
