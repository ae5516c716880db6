"""The load of `hetero bench`: requests through a door of a running server, and figures of what their clients saw."""
