"""The ASOF join."""
