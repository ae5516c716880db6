/* Within the library. */
#ifndef HETERO_LIBRARY_H
#define HETERO_LIBRARY_H

#include "kernel.h"

/* The kernels in use. */
const hc_isa_table *hc_isa_in_use(void);

#endif
