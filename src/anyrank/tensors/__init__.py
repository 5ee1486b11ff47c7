"""Shapes, boxes, layouts and names: pure functions, tested by their properties.

Every wing enters it. It imports neither files nor processes.
"""
