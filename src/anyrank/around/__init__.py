"""What a plain load and a plain run do not load.

Each room is opened by a door, where it is asked for: by an option, the ending of a file, a URL or a
public name. tests/unit/test_house.py lists the doors.
"""
