"""Conditions on the card, and the arithmetic of decimals that they need."""
