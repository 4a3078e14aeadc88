"""What every operator shares: the delta law, once."""
