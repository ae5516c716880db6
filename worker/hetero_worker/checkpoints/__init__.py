"""Model directories on disk: a module per format, a registry of formats, quantised matrices and packed weights."""
