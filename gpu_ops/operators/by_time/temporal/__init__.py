"""The temporal join, and how long it keeps a key."""
