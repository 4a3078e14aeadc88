"""The operators, one file each; what they share stands in `changes`, `pairs` and `visibility`."""
