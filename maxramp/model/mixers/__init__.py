"""Mixers: the parts of layers that carry information from token to token."""
