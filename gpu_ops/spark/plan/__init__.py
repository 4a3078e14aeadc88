"""The streaming plan of a join: how inputs become one stream, the shuffle, what columns say about themselves."""
