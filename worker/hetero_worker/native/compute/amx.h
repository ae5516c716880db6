/* Tiles: eight of 16 rows of 64 bytes, and products of two that are added to a third.
 *
 * Compiled with -mamx-tile, -mamx-bf16 and -mamx-int8 they are the processor's (Intel AMX). Compiled with HC_AMX_EMULATED they
 * are plain C that gives the same bits, so that what is made of tiles is tested on all machines. Without either there are
 * none, and HC_HAS_TILES is not defined.
 *
 * Tiles' numbers are constants, from 0 to 7. An operation opens them, on each thread, and closes them: what is open costs every switch
 * of threads. */
#ifndef HETERO_AMX_H
#define HETERO_AMX_H

#include "isa.h"
#include "packing.h"

#define HC_TILE_BYTES 64 /* of a row */

#if defined(HC_AMX_EMULATED)
#define HC_HAS_TILES

typedef struct {
    uint8_t rows[8], row_bytes[8];
    _Alignas(64) uint8_t bytes[8][HC_TILE_ROWS][HC_TILE_BYTES];
} hc_amx;

static inline void hc_amx_open(hc_amx *amx, const uint8_t rows[8], const uint8_t row_bytes[8]) {
    memset(amx, 0, sizeof *amx);
    memcpy(amx->rows, rows, sizeof amx->rows);
    memcpy(amx->row_bytes, row_bytes, sizeof amx->row_bytes);
}

static inline void hc_amx_close(hc_amx *amx) { (void)amx; }

static inline void hc_amx_wrote(void) {}

static inline void hc_amx_zero_(hc_amx *amx, int to) { memset(amx->bytes[to], 0, sizeof amx->bytes[to]); }

static inline void hc_amx_load_(hc_amx *amx, int to, const void *from, uint64_t stride) {
    for (uint64_t row = 0; row < amx->rows[to]; row++)
        memcpy(amx->bytes[to][row], (const char *)from + row * stride, amx->row_bytes[to]);
}

static inline void hc_amx_store_(const hc_amx *amx, int from, void *to, uint64_t stride) {
    for (uint64_t row = 0; row < amx->rows[from]; row++)
        memcpy((char *)to + row * stride, amx->bytes[from][row], amx->row_bytes[from]);
}

/* The instruction takes subnormal numbers for 0, and gives 0 for them. */
static inline float hc_amx_flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

static inline float hc_amx_half(const uint8_t *pair, int is_upper) {
    uint32_t bits;
    float x;
    memcpy(&bits, pair, sizeof bits);
    bits = is_upper ? bits & 0xffff0000u : bits << 16;
    memcpy(&x, &bits, sizeof x);
    return hc_amx_flushed(x);
}

static inline void hc_amx_dot_bf16_(hc_amx *amx, int to, int a, int b) {
    for (uint64_t row = 0; row < amx->rows[to]; row++)
        for (uint64_t column = 0; column < HC_LANES; column++) {
            float sum, sums[2] = {0.0f, 0.0f};
            for (uint64_t pair = 0; pair < HC_LANES; pair++)
                for (int half = 0; half < 2; half++)
                    sums[half] = hc_amx_flushed(fmaf(hc_amx_half(&amx->bytes[a][row][pair * 4], half),
                                                     hc_amx_half(&amx->bytes[b][pair][column * 4], half), sums[half]));
            uint8_t *at = &amx->bytes[to][row][column * 4];
            memcpy(&sum, at, sizeof sum);
            sum = hc_amx_flushed(hc_amx_flushed(sum) + hc_amx_flushed(sums[0] + sums[1]));
            memcpy(at, &sum, sizeof sum);
        }
}

/* Signed bytes of both. */
static inline void hc_amx_dot_bytes_(hc_amx *amx, int to, int a, int b) {
    for (uint64_t row = 0; row < amx->rows[to]; row++)
        for (uint64_t column = 0; column < HC_LANES; column++) {
            int32_t sum;
            uint8_t *at = &amx->bytes[to][row][column * 4];
            memcpy(&sum, at, sizeof sum);
            for (uint64_t quad = 0; quad < amx->rows[b]; quad++)
                for (uint64_t i = 0; i < 4; i++)
                    sum += (int8_t)amx->bytes[a][row][quad * 4 + i] * (int8_t)amx->bytes[b][quad][column * 4 + i];
            memcpy(at, &sum, sizeof sum);
        }
}

#define HC_AMX_ZERO(amx, to) hc_amx_zero_(amx, to)
#define HC_AMX_LOAD(amx, to, from, stride) hc_amx_load_(amx, to, from, stride)
#define HC_AMX_STORE(amx, from, to, stride) hc_amx_store_(amx, from, to, stride)
#define HC_AMX_DOT_BF16(amx, to, a, b) hc_amx_dot_bf16_(amx, to, a, b)
#define HC_AMX_DOT_BYTES(amx, to, a, b) hc_amx_dot_bytes_(amx, to, a, b)

#elif (defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)) || \
    (defined(__AMXTILE__) && defined(__AMXBF16__) && defined(__AMXINT8__)) /* as older clang says it */
#define HC_HAS_TILES

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} hc_amx;

/* Between what is written to memory and the tiles that are loaded of it: the compiler does not know that loading reads. */
static inline void hc_amx_wrote(void) { __asm__ volatile("" ::: "memory"); }

static inline void hc_amx_open(hc_amx *amx, const uint8_t rows[8], const uint8_t row_bytes[8]) {
    *amx = (hc_amx){.palette = 1};
    for (int i = 0; i < 8; i++) {
        amx->rows[i] = rows[i];
        amx->row_bytes[i] = row_bytes[i];
    }
    _tile_loadconfig(amx);
    hc_amx_wrote();
}

static inline void hc_amx_close(hc_amx *amx) {
    (void)amx;
    _tile_release();
}

#define HC_AMX_ZERO(amx, to) _tile_zero(to)
#define HC_AMX_LOAD(amx, to, from, stride) _tile_loadd(to, from, stride)
#define HC_AMX_STORE(amx, from, to, stride) _tile_stored(from, to, stride)
#define HC_AMX_DOT_BF16(amx, to, a, b) _tile_dpbf16ps(to, a, b)
#define HC_AMX_DOT_BYTES(amx, to, a, b) _tile_dpbssd(to, a, b)
#endif

#endif
