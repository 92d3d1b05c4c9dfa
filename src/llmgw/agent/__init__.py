"""The agent: tree.py is the nursery tree of a node, shards.py the life of one shard."""
