"""The decoder."""
