/* What the kernels of an instruction set are to the rest of the library: a table of functions, one a kind.
 *
 * A kernel is called by every member of the team at once, and does its share: which rows, heads or panels those are
 * follows from member and crew->size. Between two operations the members meet; within one they may, by hc_meet. */
#ifndef HETERO_KERNEL_H
#define HETERO_KERNEL_H

#include <stddef.h>

#include "compute.h"

typedef struct {
    uint64_t size;
    struct hc_barrier *barrier;
} hc_crew;

typedef void hc_kernel(const hc_op *op, hc_crew *crew, uint64_t member);

typedef struct {
    const char *name;
    int (*is_supported)(void);
    hc_kernel *kernels[HC_KINDS]; /* none for HC_CALL */
} hc_isa_table;

/* All members wait here for all; what they wrote before is seen by all behind it. */
void hc_meet(hc_crew *crew);

/* Share `member` of `count` things among `size`: [*begin, *end), contiguous, as even as can be. */
static inline void hc_share_of(uint64_t count, uint64_t size, uint64_t member, uint64_t *begin, uint64_t *end) {
    *begin = count * member / size;
    *end = count * (member + 1) / size;
}

/* Scratch of kinds that have some; alike for all instruction sets. */
uint64_t hc_linear_scratch(const hc_linear_op *op, uint64_t team_size);
uint64_t hc_attend_scratch(const hc_attend_op *op, uint64_t team_size);
uint64_t hc_attend_span_scratch(const hc_attend_span_op *op, uint64_t team_size);

#endif
