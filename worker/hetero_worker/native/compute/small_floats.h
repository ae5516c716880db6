/* Floats of 8 and 4 bits, as they lie in memory: how they become wider in registers.
 *
 * An 8-bit float (E4M3) shifted by seven bits is a 16-bit one, of a 256th: its exponent counts from 7, theirs from 15. That is
 * right for subnormal numbers, too. What is no number in E4M3 never gets here: checkpoints with it are refused.
 * Twice a 4-bit float (E2M1) is a whole number up to 12; with HC_F4_ZERO added it has no sign. */
#ifndef HETERO_SMALL_FLOATS_H
#define HETERO_SMALL_FLOATS_H

#include "bytes.h"

#define HC_F4_TABLE 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0

/* Bytes of a number that is kept as a float. */
static inline uint64_t hc_float_width(uint64_t format) { return format == HC_F8 ? 1 : hc_width_of(format); }

/* The 16-bit float of an 8-bit one, divided by 256. */
static inline uint16_t hc_half_of_f8(uint8_t bits) { return (uint16_t)((bits & 0x80u) << 8 | (bits & 0x7fu) << 7); }

/* 16 of them, divided by 256. */
static inline f32x16 hc_widen_f8(const uint8_t *p) {
#if defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512BW__)
    __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    return (f32x16)_mm512_cvtph_ps(_mm256_and_si256(shifted, _mm256_set1_epi16((short)0xbfff)));
#else
    uint16_t halves[HC_LANES];
    for (int i = 0; i < HC_LANES; i++)
        halves[i] = hc_half_of_f8(p[i]);
    return hc_widen_f16(halves);
#endif
}

/* Twice each float, and HC_F4_ZERO, by its bits, which are below 16. */
static inline u8x64 hc_looked_up(u8x64 codes) {
#if defined(__AVX512BW__)
    __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(HC_F4_TABLE));
    return (u8x64)_mm512_shuffle_epi8(table, (__m512i)codes);
#elif defined(__AVX2__)
    __m256i halves[2], table = _mm256_broadcastsi128_si256(_mm_setr_epi8(HC_F4_TABLE));
    memcpy(halves, &codes, sizeof codes);
    for (int i = 0; i < 2; i++)
        halves[i] = _mm256_shuffle_epi8(table, halves[i]);
    memcpy(&codes, halves, sizeof codes);
    return codes;
#else
    static const uint8_t table[16] = {HC_F4_TABLE};
#if defined(__aarch64__)
    uint8x16_t parts[4], values = vld1q_u8(table);
    memcpy(parts, &codes, sizeof codes);
    for (int i = 0; i < 4; i++)
        parts[i] = vqtbl1q_u8(values, parts[i]);
    memcpy(&codes, parts, sizeof codes);
#else
    for (int i = 0; i < 64; i++)
        codes[i] = table[codes[i]];
#endif
    return codes;
#endif
}

/* Values of 4 bits, whole numbers or floats, in the low and in the high halves of bytes. */
static inline __attribute__((always_inline)) u8x64 hc_low_values(u8x64 bytes, const int are_floats) {
    return are_floats ? hc_looked_up(hc_low_nibbles(bytes)) : hc_low_nibbles(bytes);
}

static inline __attribute__((always_inline)) u8x64 hc_high_values(u8x64 bytes, const int are_floats) {
    return are_floats ? hc_looked_up(hc_high_nibbles(bytes)) : hc_high_nibbles(bytes);
}

#endif
