"""A libcuda.so.1 that is none: whoever calls it leaves a mark. For machines without a driver.

Its functions are those that a program begins with, whichever way: cuInit, cuDeviceGetCount, cuCtxCreate, and
cuGetProcAddress, by which newer programs ask for all others.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
static int mark(const char *name) {
    const char *path = getenv("HETERO_TEST_CUDA_MARK");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) { fprintf(file, "called %s\n", name); fclose(file); }
    return 100; /* CUDA_ERROR_NO_DEVICE */
}
int cuInit(unsigned flags) { (void)flags; return mark("cuInit"); }
int cuDriverGetVersion(int *version) { *version = 12080; return mark("cuDriverGetVersion"); }
int cuDeviceGetCount(int *count) { *count = 0; return mark("cuDeviceGetCount"); }
int cuCtxCreate_v2(void **context, unsigned flags, int device) {
    (void)flags; (void)device; *context = NULL; return mark("cuCtxCreate");
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    (void)device; *context = NULL; return mark("cuDevicePrimaryCtxRetain");
}
int cuGetProcAddress_v2(const char *symbol, void **function, int version, unsigned long flags, void *status) {
    (void)symbol; (void)version; (void)flags; (void)status; *function = NULL; return mark("cuGetProcAddress");
}
"""


def build_stand_in(folder: Path) -> Path:
    """libcuda.so.1 in the folder, which is returned, for LD_LIBRARY_PATH. Raises CalledProcessError."""
    source = folder / "libcuda.c"
    source.write_text(_SOURCE, encoding="utf-8")
    library = folder / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return folder
