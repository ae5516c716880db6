"""Native kernels for host cores, in C, and how native libraries are built and loaded.

`build.py` compiles them (the package's build, `make native`) with any C11 compiler. They know no torch and no Python,
so they serve every version of both. `loading.py` loads a library only if it was built from the sources beside it.
"""
