"""State servers: their processes, the partitions they own, recovery, and the directory that knows them."""
