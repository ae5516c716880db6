/* Low-rank products of adapters: each row with the factors of its own adapter.
 *
 * Some rows at a time, members first share the products with `down`, then meet, then share the columns of y. A member has
 * the same columns of every row, so that it reads its part of `up` from its own cache. */
#include "low_rank.h"
#include "vectors.h"

extern hc_kernel HC_NAME(low_rank);

#define PIECE 64 /* columns that are one member's */
#define BLOCK 4  /* rows of `down` that are multiplied with one reading of x */

/* The factors of a row's adapter for the first part; NULL: it has none. */
static const hc_factors *factors_of(const hc_low_rank_op *op, uint64_t row) {
    uint64_t number = (uint64_t)op->numbers[row];
    return number && number < op->adapters ? op->table[number] : NULL;
}

static float *products_of(const hc_low_rank_op *op, uint64_t row, uint64_t part) {
    return (float *)op->scratch + (row * op->parts + part) * HC_MAX_RANK;
}

/* y[k] = x times row k of `down`, in an order that only the width decides. */
V_INLINE void shrink_some(const hc_low_rank_op *op, const void *x, const char *down, float *y, const int count,
                          const uint64_t type) {
    vf sums[BLOCK] = {{0}};
    for (uint64_t i = 0; i < op->in; i += HC_W) {
        vf v = v_load_up_to_as(hc_at(x, i, type), op->in - i, type);
#pragma GCC unroll 4
        for (int k = 0; k < count; k++) {
            const void *at = hc_at(down, (uint64_t)k * op->in + i, type);
            sums[k] = v_fma(v, v_load_up_to_as(at, op->in - i, type), sums[k]);
        }
    }
    for (int k = 0; k < count; k++)
        y[k] = v_sum(sums[k]);
}

V_INLINE void shrink_block(const hc_low_rank_op *op, const void *x, const hc_factors *factors, uint64_t first, float *y,
                           const uint64_t type) {
    const char *down = hc_at(factors->down, first * op->in, type);
    if (factors->rank - first >= BLOCK) {
        shrink_some(op, x, down, y + first, BLOCK, type);
        return;
    }
    for (; first < factors->rank; first++, down += op->in * hc_width_of(type))
        shrink_some(op, x, down, y + first, 1, type);
}

/* y += products times `up`, for columns [begin, end) of a part, rounded once. */
V_INLINE void expand_piece(const hc_factors *factors, const float *products, uint64_t begin, uint64_t end, uint64_t width,
                           void *y, const uint64_t y_type, const uint64_t type) {
    for (uint64_t i = begin; i < end; i += HC_W) {
        vf sum = {0};
        for (uint64_t k = 0; k < factors->rank; k++) {
            const void *up = hc_at(factors->up, k * width + i, type);
            sum = v_fma(v_all(products[k]), v_load_up_to_as(up, end - i, type), sum);
        }
        void *at = hc_to(y, i, y_type);
        v_store_up_to_as(at, v_load_up_to_as(at, end - i, y_type) + sum, end - i, y_type);
    }
}

/* Factors have the type of x. */
V_INLINE void shrink_rows(const hc_low_rank_op *op, uint64_t first, uint64_t rows, const hc_crew *crew, uint64_t member,
                          const uint64_t type) {
    uint64_t turn = 0;
    for (uint64_t row = 0; row < rows; row++) {
        const hc_factors *factors = factors_of(op, first + row);
        const void *x = hc_at(op->x, (first + row) * op->x_stride, type);
        for (uint64_t part = 0; factors && part < op->parts; part++)
            for (uint64_t k = 0; k < factors[part].rank; k += BLOCK)
                if (turn++ % crew->size == member)
                    shrink_block(op, x, factors + part, k, products_of(op, row, part), type);
    }
}

V_INLINE void expand_rows(const hc_low_rank_op *op, uint64_t first, uint64_t rows, const hc_crew *crew, uint64_t member,
                          const uint64_t y_type, const uint64_t type) {
    for (uint64_t row = 0; row < rows; row++) {
        const hc_factors *factors = factors_of(op, first + row);
        void *y = hc_to(op->y, (first + row) * op->ends[op->parts - 1], y_type);
        for (uint64_t part = 0, begin = 0; factors && part < op->parts; begin = op->ends[part++]) {
            uint64_t width = op->ends[part] - begin, pieces = factors[part].rank ? (width + PIECE - 1) / PIECE : 0;
            for (uint64_t piece = member; piece < pieces; piece += crew->size) {
                uint64_t end = (piece + 1) * PIECE < width ? (piece + 1) * PIECE : width;
                expand_piece(factors + part, products_of(op, row, part), piece * PIECE, end, width, hc_to(y, begin, y_type),
                             y_type, type);
            }
        }
    }
}

V_INLINE void expand_own_type(const hc_low_rank_op *op, uint64_t first, uint64_t rows, const hc_crew *crew, uint64_t member,
                              const uint64_t type) {
    expand_rows(op, first, rows, crew, member, type, type);
}

void HC_NAME(low_rank)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_low_rank_op *op = (const hc_low_rank_op *)header;
    for (uint64_t first = 0; first < header->rows; first += HC_LOW_RANK_ROWS) {
        uint64_t left = header->rows - first, rows = left < HC_LOW_RANK_ROWS ? left : HC_LOW_RANK_ROWS;
        if (first)
            hc_meet(crew); /* before the products are written again */
        V_TYPED(op->type, shrink_rows, op, first, rows, crew, member);
        hc_meet(crew);
        if (op->y_type == op->type)
            V_TYPED(op->type, expand_own_type, op, first, rows, crew, member);
        else
            V_TYPED(op->type, expand_rows, op, first, rows, crew, member, (uint64_t)HC_F32);
    }
}
