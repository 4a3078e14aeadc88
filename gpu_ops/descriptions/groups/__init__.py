"""What a user writes down of operators over the groups of one input."""
