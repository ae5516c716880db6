/* Products of attention, in blocks of rows and vectors that fill the registers.
 *
 * Scores take a dimension after the other, with a token a lane: keys are transposed for that, SLAB tokens together.
 * Values are taken a token after the other, with a dimension a lane. Each element of a result is one chain of
 * additions, the same in a block of whatever size. */
#ifndef HETERO_ATTEND_BLOCKS_H
#define HETERO_ATTEND_BLOCKS_H

#include "vectors.h"

#include "attend.h"

#if HC_W == 16 || defined(__aarch64__) /* 32 registers */
#define VECTORS 4
#else
#define VECTORS 2
#endif
#define ROWS 6
#define SLAB (VECTORS * HC_W)

/* Calls block(..., rows, vectors) with constants. */
#define OF_VECTORS(block, rows, vectors, ...)  \
    switch (vectors) {                         \
    case 1:                                    \
        block(__VA_ARGS__, rows, 1);           \
        break;                                 \
    case 2:                                    \
        block(__VA_ARGS__, rows, 2);           \
        break;                                 \
    case 3:                                    \
        block(__VA_ARGS__, rows, MORE(3));     \
        break;                                 \
    default:                                   \
        block(__VA_ARGS__, rows, MORE(4));     \
    }
#define MORE(vectors) (VECTORS < vectors ? VECTORS : vectors)
#define OF_BLOCK(block, rows, vectors, ...)                \
    switch (rows) {                                        \
    case 1:                                                \
        OF_VECTORS(block, 1, vectors, __VA_ARGS__) break;  \
    case 2:                                                \
        OF_VECTORS(block, 2, vectors, __VA_ARGS__) break;  \
    case 3:                                                \
        OF_VECTORS(block, 3, vectors, __VA_ARGS__) break;  \
    case 4:                                                \
        OF_VECTORS(block, 4, vectors, __VA_ARGS__) break;  \
    case 5:                                                \
        OF_VECTORS(block, 5, vectors, __VA_ARGS__) break;  \
    default:                                               \
        OF_VECTORS(block, ROWS, vectors, __VA_ARGS__)      \
    }

/* Prefetches elements [d, d + count) of a cache's row, which are read soon. */
V_INLINE void expect(const void *row, uint64_t d, uint64_t count, const uint64_t type) {
#pragma GCC unroll 4
    for (uint64_t i = 0; i < count * hc_width_of(type); i += 64)
        __builtin_prefetch((const char *)hc_at(row, d, type) + i);
}

/* `count` dimensions of HC_W tokens, from d on, to rows of SLAB. */
V_INLINE void transpose_block(const void *const *keys, const void *const *values, uint64_t d, float *to,
                              uint64_t count, const uint64_t type) {
    vf block[HC_W];
#pragma GCC unroll 16
    for (int i = 0; i < HC_W; i++) {
        block[i] = v_load_up_to_as(hc_at(keys[i], d, type), count, type);
        __builtin_prefetch(hc_at(values[i], d, type));
    }
    v_transpose(block);
#pragma GCC unroll 16
    for (uint64_t i = 0; i < HC_W; i++)
        if (i < count)
            v_store(to + i * SLAB, block[i]);
}

/* Scores of `rows` query rows with `vectors` vectors of tokens of a slab. */
V_INLINE void score_block(const float *query, uint64_t stride, const float *keys, uint64_t head_dim, float *scores,
                          int rows, int vectors) {
    vf sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sums[r][v] = (vf){0};
    for (uint64_t d = 0; d < head_dim; d++) {
        vf key[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            key[v] = v_load(keys + d * SLAB + v * HC_W);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vf element = v_all(query[(uint64_t)r * stride + d]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                sums[r][v] = v_fma(element, key[v], sums[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            v_store(scores + r * HC_CHUNK + v * HC_W, sums[r][v]);
}

/* Weights of tokens [begin, end) by `vectors` vectors of their values from dimension d on, joined to totals. What lies
 * at the first `num_next` of `next` is asked for on the way. */
V_INLINE void sum_block(const float *weights, const void *const *values, const uint64_t type, uint64_t d,
                        uint64_t begin, uint64_t end, const void *const *next, uint64_t num_next,
                        const uint64_t next_type, float *total, uint64_t stride, const float *of_total,
                        const float *of_chunk, int rows, int vectors) {
    vf sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sums[r][v] = (vf){0};
    for (uint64_t token = begin; token < end; token++) {
        vf value[VECTORS];
        if (token - begin < num_next)
            expect(next[token - begin], d, (uint64_t)vectors * HC_W, next_type);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            value[v] = v_load_as(hc_at(values[token], d + (uint64_t)v * HC_W, type), type);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vf weight = v_all(weights[(uint64_t)r * HC_CHUNK + token]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                sums[r][v] = v_fma(weight, value[v], sums[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            float *at = total + (uint64_t)r * stride + d + v * HC_W;
            v_store(at, v_fma(sums[r][v], v_all(of_chunk[r]), v_load(at) * of_total[r]));
        }
}

#endif
