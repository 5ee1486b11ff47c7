"""Shapes, boxes, layouts and names: pure functions, tested by their properties.

Every wing but `world` and `integrations` may import this one. It imports neither `files` nor
`world`.
"""
