"""Shapes, boxes, layouts and names: pure functions, tested by their properties.

Every wing may import this one. It imports neither files nor processes.
"""
