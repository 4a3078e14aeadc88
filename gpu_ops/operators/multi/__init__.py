"""The multi-way join; and what it is made of: lookups from input to input, tuples in the making, pads by counts."""
