"""Bytes at rest: local files, object stores, the reader, checksums.

All code that reads or writes bytes belongs here. The wing may import `tensors`, and does not
communicate between processes.
"""
