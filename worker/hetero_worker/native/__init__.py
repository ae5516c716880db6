"""The exchange between ranks of one host, in C: rounds and links through shared memory.

`exchange.h` says what it does, `exchange.c` how, `build.py` compiles it (the package's build, `make native`), and
`library.py` loads it. It knows no torch and no Python, so it builds in seconds with any C11 compiler and serves every
version of both. A group with a rank that has no library, or a stale one, exchanges over Gloo, slower.
"""
