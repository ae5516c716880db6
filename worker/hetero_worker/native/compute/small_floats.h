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

/* HC_W of them, divided by 256. */
V_INLINE vf v_widen_f8(const uint8_t *p) {
#if defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512BW__)
    __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    return (vf)_mm512_cvtph_ps(_mm256_and_si256(shifted, _mm256_set1_epi16((short)0xbfff)));
#elif defined(__AVX2__)
    __m128i shifted = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)(const void *)p)), 7);
    return (vf)_mm256_cvtph_ps(_mm_and_si128(shifted, _mm_set1_epi16((short)0xbfff)));
#else
    uint16_t halves[HC_W];
    for (int i = 0; i < HC_W; i++)
        halves[i] = hc_half_of_f8(p[i]);
    return v_load_as(halves, HC_F16);
#endif
}

/* Twice each float, and HC_F4_ZERO, by its bits, which are below 16. */
V_INLINE vb v_looked_up(vb codes) {
#if defined(__AVX512BW__)
    return (vb)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_setr_epi8(HC_F4_TABLE)), (__m512i)codes);
#elif defined(__AVX2__)
    return (vb)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_setr_epi8(HC_F4_TABLE)), (__m256i)codes);
#else
    static const uint8_t table[16] = {HC_F4_TABLE};
#if defined(__aarch64__)
    return (vb)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)codes);
#else
    for (uint64_t i = 0; i < sizeof codes; i++)
        codes[i] = table[codes[i]];
    return codes;
#endif
#endif
}

/* Values of 4 bits, whole numbers or floats, in the low and in the high halves of bytes. */
V_INLINE vb v_low_values(vb bytes, const int are_floats) {
    return are_floats ? v_looked_up(v_low_nibbles(bytes)) : v_low_nibbles(bytes);
}

V_INLINE vb v_high_values(vb bytes, const int are_floats) {
    return are_floats ? v_looked_up(v_high_nibbles(bytes)) : v_high_nibbles(bytes);
}

#endif
