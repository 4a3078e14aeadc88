"""Joins by time: over an interval, as of a moment, to the nearest row; what a watermark ends."""
