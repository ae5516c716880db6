/* y = activation(gate) * up: members share columns as well as rows. If the product that makes gate and up is given, tiles
 * gate what they have summed; otherwise it is made first. */
#include "amx.h"
#include "gate.h"
#include "linear.h"

extern hc_kernel HC_NAME(gated), HC_NAME(gated_tiles), HC_NAME(gated_int_tiles), HC_NAME(linear);

#define PIECE 64      /* columns that are one member's */
#define LEAST_ROWS 64 /* that tiles gate: what fewer make stays in cache, and two streams of weights are slower than one */

#if defined(HC_HAS_TILES)
/* The kernel that gates where it sums, or NULL. Panels have to be of gates or of ups. */
static hc_kernel *tiles_for(const hc_gated_op *op) {
    const hc_linear_op *product = op->product;
    if (op->op.rows < LEAST_ROWS || op->columns % HC_PANEL || !product->weight->in)
        return NULL;
    if (product->weight->format == HC_BF16)
        return HC_NAME(gated_tiles);
    return hc_takes_int_tiles(product) ? HC_NAME(gated_int_tiles) : NULL;
}
#endif

void HC_NAME(gated)(const hc_op *any, hc_crew *crew, uint64_t member) {
    const hc_gated_op *op = (const hc_gated_op *)any;
    if (op->product) {
#if defined(HC_HAS_TILES)
        hc_kernel *tiles = tiles_for(op);
        if (tiles) {
            tiles(any, crew, member);
            return;
        }
#endif
        HC_NAME(linear)(&op->product->op, crew, member);
        hc_meet(crew);
    }
    uint64_t type = op->type, columns = op->columns, pieces = (columns + PIECE - 1) / PIECE, begin, end;
    hc_share_of(any->rows * pieces, crew->size, member, &begin, &end);
    while (begin < end) { /* what this member has of a row, at once */
        uint64_t row = begin / pieces, first = begin % pieces * PIECE;
        uint64_t past = end < (row + 1) * pieces ? (end - row * pieces) * PIECE : columns;
        const void *gates = hc_at(op->gate_up, row * columns * (op->up ? 1 : 2) + first, type);
        const void *ups = op->up ? hc_at(op->up, row * op->up_stride + first, type) : hc_at(gates, columns, type);
        HC_BASE_NAME(gate_rows)(op, &(hc_gate_rows){.rows = 1, .columns = past - first, .gates = gates, .ups = ups,
                                                    .y = hc_to(op->y, row * columns + first, type)});
        begin = (row + 1) * pieces;
    }
}
