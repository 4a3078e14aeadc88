"""The streaming plan of a join: how inputs become one stream, the shuffle, the metadata of columns."""
