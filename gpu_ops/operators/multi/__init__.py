"""What a multi-way join is made of: lookups from input to input, tuples in the making, pads by counts."""
