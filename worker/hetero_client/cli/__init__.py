"""The `hetero` command."""
