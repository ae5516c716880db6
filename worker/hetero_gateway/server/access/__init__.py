"""Who may come through a door, and what each may take.

principals   who calls, and the guard of a door     keys      keys by their hashes
limits       what a principal has taken             intake    requests of principals to the engine
files        files that are read again when they change        tls       certificates of both doors
tracing      spans of calls
"""
