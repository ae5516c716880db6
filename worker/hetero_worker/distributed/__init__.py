"""Process groups and host exchanges of one rank."""
