"""The decoder, spread over ranks by a shard plan."""
