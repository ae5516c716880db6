"""The objects that a resource owns, a module each concern. Everything here is a function of a `Rendering`."""
