"""The device mesh: its axes and sizes, how arrays lie on it, and collectives along it."""
