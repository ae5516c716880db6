/* Gates of rows: the product that one gate of a row is made of, and what gates let through. */
#include "vectors.h"

extern hc_kernel HC_NAME(open);
extern hc_kernel HC_NAME(products);

#define PIECE 64 /* columns that are one member's */

V_INLINE void open_columns(void *x, const void *gates, uint64_t count, uint64_t gates_type, const uint64_t type) {
    for (uint64_t i = 0; i < count; i += HC_W) {
        vf gate = v_load_up_to_as(hc_at(gates, i, gates_type), count - i, gates_type);
        void *at = hc_to(x, i, type);
        v_store_up_to_as(at, v_load_up_to_as(at, count - i, type) / (1.0f + v_exp(-gate)), count - i, type);
    }
}

/* One gate for all columns. */
V_INLINE void open_row(void *x, const void *gate, uint64_t count, uint64_t gates_type, const uint64_t type) {
    vf shut = 1.0f + v_exp(-v_all(v_load_up_to_as(gate, 1, gates_type)[0]));
    for (uint64_t i = 0; i < count; i += HC_W) {
        void *at = hc_to(x, i, type);
        v_store_up_to_as(at, v_load_up_to_as(at, count - i, type) / shut, count - i, type);
    }
}

void HC_NAME(open)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_open_op *op = (const hc_open_op *)header;
    uint64_t columns = op->columns, pieces = (columns + PIECE - 1) / PIECE, begin, end;
    hc_share_of(header->rows * pieces, crew->size, member, &begin, &end);
    for (uint64_t unit = begin; unit < end; unit++) {
        uint64_t row = unit / pieces, first = unit % pieces * PIECE, left = columns - first;
        uint64_t count = left < PIECE ? left : PIECE;
        void *x = hc_to(op->x, row * columns + first, op->type);
        const void *gates = hc_at(op->gates, op->is_whole ? row : row * columns + first, op->gates_type);
        if (op->is_whole)
            V_TYPED(op->type, open_row, x, gates, count, op->gates_type);
        else
            V_TYPED(op->type, open_columns, x, gates, count, op->gates_type);
    }
}

/* In an order that only the width decides. */
V_INLINE void multiply_rows(const hc_products_op *op, uint64_t begin, uint64_t end, const uint64_t type) {
    for (uint64_t row = begin; row < end; row++) {
        vf sum = {0};
        for (uint64_t i = 0; i < op->width; i += HC_W) {
            vf x = v_load_up_to_as(hc_at(op->x, row * op->width + i, type), op->width - i, type);
            sum = v_fma(x, v_load_up_to(op->weight + i, op->width - i), sum);
        }
        op->y[row] = v_sum(sum);
    }
}

void HC_NAME(products)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_products_op *op = (const hc_products_op *)header;
    uint64_t begin, end;
    hc_share_of(header->rows, crew->size, member, &begin, &end);
    V_TYPED(op->type, multiply_rows, op, begin, end);
}
