/* What the library says of itself, and which kernels it computes with. */
#include "choosing.h"
#include "delta.h"
#include "experts.h"
#include "library.h"
#include "linear.h"
#include "low_rank.h"
#include "route.h"

#include <stdatomic.h>
#include <string.h>

#ifndef HC_SOURCE
#define HC_SOURCE "unknown"
#endif

extern const hc_isa_table hc_table_generic;
#define IF_BUILT __attribute__((weak)) /* NULL for a set that the compiler does not know */
#if defined(__x86_64__)
extern const hc_isa_table hc_table_avx2 IF_BUILT, hc_table_avx512 IF_BUILT, hc_table_avx512_bf16 IF_BUILT;
extern const hc_isa_table hc_table_amx IF_BUILT, hc_table_amx_emulated IF_BUILT;
static const hc_isa_table *const TABLES[] = {&hc_table_amx,  &hc_table_avx512_bf16, &hc_table_avx512,
                                             &hc_table_avx2, &hc_table_generic,     &hc_table_amx_emulated};
#elif defined(__aarch64__)
extern const hc_isa_table hc_table_dotprod IF_BUILT;
static const hc_isa_table *const TABLES[] = {&hc_table_dotprod, &hc_table_generic};
#else
static const hc_isa_table *const TABLES[] = {&hc_table_generic};
#endif
#define NUM_TABLES (sizeof TABLES / sizeof *TABLES)

static const hc_isa_table *_Atomic in_use;

static const hc_isa_table *supported(uint64_t index) {
    for (uint64_t i = 0; i < NUM_TABLES; i++)
        if (TABLES[i] && TABLES[i]->is_supported() && !index--)
            return TABLES[i];
    return NULL;
}

const hc_isa_table *hc_isa_in_use(void) {
    const hc_isa_table *table = atomic_load_explicit(&in_use, memory_order_acquire);
    if (!table) { /* asked once: a virtual machine stops for each question to the processor */
        table = supported(0);
        atomic_store_explicit(&in_use, table, memory_order_release);
    }
    return table;
}

const char *hc_in_use(void) { return hc_isa_in_use()->name; }

const char *hc_isa(uint64_t index) {
    const hc_isa_table *table = supported(index);
    return table ? table->name : NULL;
}

int hc_use(const char *isa) {
    const hc_isa_table *table;
    for (uint64_t i = 0; (table = supported(i)); i++)
        if (!strcmp(table->name, isa)) {
            atomic_store_explicit(&in_use, table, memory_order_release);
            return 0;
        }
    return -1;
}

const char *hc_source(void) { return HC_SOURCE; }

uint64_t hc_scratch_bytes(const hc_op *op, uint64_t team_size) {
    switch (op->kind) {
    case HC_LINEAR:
        return hc_linear_scratch((const hc_linear_op *)op, team_size);
    case HC_HEADS:
        return team_size * hc_heads_member_bytes((const hc_heads_op *)op);
    case HC_DELTA:
        return team_size * hc_delta_member_bytes((const hc_delta_op *)op);
    case HC_ATTEND:
        return hc_attend_scratch((const hc_attend_op *)op, team_size);
    case HC_ATTEND_SPAN:
        return hc_attend_span_scratch((const hc_attend_span_op *)op, team_size);
    case HC_CHOOSE:
        return hc_choose_scratch((const hc_choose_op *)op, team_size);
    case HC_ROUTE:
        return hc_route_room_of((const hc_route_op *)op).bytes + team_size * hc_route_member_bytes((const hc_route_op *)op);
    case HC_EXPERTS:
        return hc_experts_room_of((const hc_experts_op *)op).bytes +
               team_size * hc_experts_member_bytes((const hc_experts_op *)op);
    case HC_LOW_RANK:
        return hc_low_rank_bytes((const hc_low_rank_op *)op);
    default:
        return 0;
    }
}
