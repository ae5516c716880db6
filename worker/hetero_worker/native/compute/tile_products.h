/* What kernels that multiply with tiles share: how rows become bfloat16 terms in tiles, and the product of rows with a panel.
 *
 * A tile's product takes bfloat16 only. float32 rows are split into three terms of 8 bits, which are bfloat16 and whose sum is
 * x to the last bit: products with all three are as exact as float32's. bfloat16 rows are one term. Infinite numbers and NaN
 * stay in the first term; subnormal numbers count as 0.
 *
 * A sum is made HC_PAIRED_INPUTS inputs at a time, term by term, in a float32 accumulator that stays in its tile: first
 * inputs of pairs by themselves, then second ones, then both together. It is the same for all numbers of rows.
 *
 * Rows of x are put together as tiles read them: [rows / 16][inputs / 32][term][row][32], first inputs of pairs above. */
#ifndef HETERO_TILE_PRODUCTS_H
#define HETERO_TILE_PRODUCTS_H

#include "amx.h"
#include "packing.h"
#include "tiles.h"

/* Vectors of 16 floats, which a row of a tile has. Emulated tiles, which are slow anyway, keep them in memory. */
#if defined(HC_AMX_EMULATED) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wvector-operation-performance"
#endif
typedef float f32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));

V_INLINE f32x16 hc_load(const float *p) {
    f32x16 v;
    memcpy(&v, p, sizeof v);
    return v;
}

V_INLINE f32x16 hc_all(float x) { return x - (f32x16){0}; }

/* a * b + c; one rounding where the machine has it. */
V_INLINE f32x16 hc_fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c; /* contracted by the compiler (-ffp-contract=fast) */
#endif
}

/* The first `count` of 16 numbers of an activation, zeros behind. */
V_INLINE f32x16 hc_load_as(const void *p, uint64_t count, const uint64_t type) {
    float x[HC_LANES];
    for (uint64_t i = 0; i < HC_LANES; i += HC_W)
        v_store(x + i, i < count ? v_load_up_to_as(hc_at(p, i, type), count - i, type) : v_all(0));
    return hc_load(x);
}

#define HC_STEP_BYTES (HC_PAIRED_INPUTS * HC_PANEL * sizeof(uint16_t)) /* of a panel, for a tile's inputs */
#define HC_PAIR_BYTES (2 * HC_PANEL * sizeof(uint16_t))                /* of a panel, for a pair */
#define HC_TERM_BYTES (HC_TILE_ROWS * HC_TILE_BYTES)

/* Tiles: four sums [rows][vector], two of rows, two of weights. */
#define SUM_00 0
#define SUM_01 1
#define SUM_10 2
#define SUM_11 3
#define X_0 4
#define X_1 5
#define W_0 6
#define W_1 7

/* Opens tiles for rows of which a tile has `rows`. */
static inline void hc_open_tiles(hc_amx *amx, uint64_t rows) {
    uint8_t of_rows = rows < HC_TILE_ROWS ? (uint8_t)rows : HC_TILE_ROWS;
    hc_amx_open(amx, (const uint8_t[8]){of_rows, of_rows, of_rows, of_rows, of_rows, of_rows, HC_TILE_ROWS, HC_TILE_ROWS},
                (const uint8_t[8]){64, 64, 64, 64, 64, 64, 64, 64});
}

/* Pairs of 32 inputs that are bfloat16 in the upper half of 32 bits, the first of a pair above. */
V_INLINE void hc_store_pairs(const u32x16 inputs[2], char *to) {
#if defined(__AVX512BW__)
    static const uint16_t HALVES[2 * HC_LANES] = {3,  1,  7,  5,  11, 9,  15, 13, 19, 17, 23, 21, 27, 25, 31, 29,
                                                  35, 33, 39, 37, 43, 41, 47, 45, 51, 49, 55, 53, 59, 57, 63, 61};
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16((__m512i)inputs[0], _mm512_loadu_si512(HALVES), (__m512i)inputs[1]));
#else
    uint32_t all[2 * HC_LANES];
    memcpy(all, inputs, sizeof all);
    for (int i = 0; i < HC_LANES; i++) {
        uint32_t pair = (all[2 * i] & 0xffff0000u) | all[2 * i + 1] >> 16;
        memcpy(to + i * sizeof pair, &pair, sizeof pair);
    }
#endif
}

/* Lanes that are infinite, or NaN. */
V_INLINE u32x16 hc_no_numbers(f32x16 x) { return (u32x16)(((u32x16)x & 0x7f800000) == 0x7f800000); }

V_INLINE int hc_has_any(u32x16 mask) {
    uint64_t any = 0, parts[sizeof mask / sizeof any];
    memcpy(parts, &mask, sizeof mask);
    for (uint64_t i = 0; i < sizeof mask / sizeof any; i++)
        any |= parts[i];
    return any != 0;
}

/* 32 inputs of a row, to all terms; a single one takes what is bfloat16. What a term cuts off of a number is in the next
 * ones. `odd` is or-ed to the first term. */
V_INLINE void hc_put_numbers(f32x16 v[2], const u32x16 odd[2], const uint64_t terms, char *to) {
    for (uint64_t term = 0; term < terms; term++, to += HC_TERM_BYTES) {
        u32x16 parts[2];
        for (int i = 0; i < 2; i++) {
            parts[i] = (u32x16)v[i] & 0xffff0000;
            v[i] = v[i] - (f32x16)parts[i];
            parts[i] |= term || !odd ? (u32x16){0} : odd[i];
        }
        hc_store_pairs(parts, to);
    }
}

/* The same, where infinity and NaN are the first term, NaN with a bit more lest it become infinity. */
V_INLINE void hc_put_terms(f32x16 v[2], const uint64_t terms, char *to) {
    u32x16 odd[2] = {hc_no_numbers(v[0]), hc_no_numbers(v[1])};
    if (terms > 1 && hc_has_any(odd[0] | odd[1])) {
        for (int i = 0; i < 2; i++) {
            u32x16 first = ((u32x16)v[i] & 0xffff0000) | ((u32x16)(v[i] != v[i]) & 0x400000);
            v[i] = (f32x16)((u32x16)v[i] & ~odd[i]);
            odd[i] &= first;
        }
        hc_put_numbers(v, odd, terms, to);
    } else {
        hc_put_numbers(v, NULL, terms, to);
    }
}

/* A row of `count` numbers to `steps` steps of all terms; NULL: of zeros. */
V_INLINE void hc_put_row(const void *x, uint64_t count, uint64_t steps, const uint64_t type, char *to) {
    const uint64_t terms = hc_terms(type);
    for (uint64_t step = 0; step < steps; step++, to += terms * HC_TERM_BYTES) {
        f32x16 v[2];
        if (!x) {
            for (uint64_t term = 0; term < terms; term++)
                memset(to + term * HC_TERM_BYTES, 0, HC_TILE_BYTES);
            continue;
        }
        for (uint64_t i = 0; i < 2; i++) {
            uint64_t begin = step * HC_PAIRED_INPUTS + i * HC_LANES, left = count > begin ? count - begin : 0;
            v[i] = left ? hc_load_as(hc_at(x, begin, type), left < HC_LANES ? left : HC_LANES, type) : hc_all(0);
        }
        hc_put_terms(v, terms, to);
    }
}

/* Some inputs of a panel, and of rows of one or two tiles. */
typedef struct {
    const char *w, *x;
    uint64_t steps;
    uint64_t of_tile;     /* bytes of a tile's rows */
    float *sums;          /* [rows of the tiles][HC_PANEL] */
    uint64_t sums_stride; /* bytes from row to row */
    hc_ahead ahead;
} hc_product;

/* Adds products to sums, or makes them. */
V_INLINE void hc_multiply(const int tiles, const uint64_t terms, int is_first, const hc_product *product, hc_amx *amx) {
    (void)amx;
    const uint64_t stride = product->sums_stride;
    const char *w = product->w, *x = product->x;
    float *sums = product->sums, *low = (float *)(void *)((char *)sums + HC_TILE_ROWS * stride);
    if (is_first) {
        HC_AMX_ZERO(amx, SUM_00);
        HC_AMX_ZERO(amx, SUM_01);
        if (tiles == 2) {
            HC_AMX_ZERO(amx, SUM_10);
            HC_AMX_ZERO(amx, SUM_11);
        }
    } else {
        HC_AMX_LOAD(amx, SUM_00, sums, stride);
        HC_AMX_LOAD(amx, SUM_01, sums + HC_LANES, stride);
        if (tiles == 2) {
            HC_AMX_LOAD(amx, SUM_10, low, stride);
            HC_AMX_LOAD(amx, SUM_11, low + HC_LANES, stride);
        }
    }
    for (uint64_t step = 0; step < product->steps; step++, w += HC_STEP_BYTES) {
        hc_ask_for(&product->ahead, step * HC_STEP_BYTES);
        HC_AMX_LOAD(amx, W_0, w, HC_PAIR_BYTES);
        HC_AMX_LOAD(amx, W_1, w + HC_TILE_BYTES, HC_PAIR_BYTES);
        HC_UNROLLED
        for (uint64_t term = 0; term < terms; term++, x += HC_TERM_BYTES) {
            HC_AMX_LOAD(amx, X_0, x, HC_TILE_BYTES);
            HC_AMX_DOT_BF16(amx, SUM_00, X_0, W_0);
            HC_AMX_DOT_BF16(amx, SUM_01, X_0, W_1);
            if (tiles == 2) {
                HC_AMX_LOAD(amx, X_1, x + product->of_tile, HC_TILE_BYTES);
                HC_AMX_DOT_BF16(amx, SUM_10, X_1, W_0);
                HC_AMX_DOT_BF16(amx, SUM_11, X_1, W_1);
            }
        }
    }
    HC_AMX_STORE(amx, SUM_00, sums, stride);
    HC_AMX_STORE(amx, SUM_01, sums + HC_LANES, stride);
    if (tiles == 2) {
        HC_AMX_STORE(amx, SUM_10, low, stride);
        HC_AMX_STORE(amx, SUM_11, low + HC_LANES, stride);
    }
}

#define HC_MULTIPLY(terms)                              \
    if (tiles == 1)                                     \
        hc_multiply(1, terms, is_first, product, amx);  \
    else                                                \
        hc_multiply(2, terms, is_first, product, amx);

/* The same, with constants. */
static inline void hc_multiply_tiles(uint64_t tiles, uint64_t terms, int is_first, const hc_product *product, hc_amx *amx) {
    switch (terms) {
    case 1:
        HC_MULTIPLY(1)
        break;
    case 2:
        HC_MULTIPLY(2)
        break;
    default:
        HC_MULTIPLY(3)
    }
}

#undef HC_MULTIPLY

#endif
