"""The decoder, tensor-parallel by a shard plan."""
