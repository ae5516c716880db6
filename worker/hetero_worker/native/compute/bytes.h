/* Whole numbers as kernels multiply them: a vector's bytes of weights, which are HC_W lanes of four inputs each, with four
 * signed bytes of x. Sums are exact on every instruction set. */
#ifndef HETERO_BYTES_H
#define HETERO_BYTES_H

#include "packing.h"
#include "vectors.h"

typedef uint8_t vb __attribute__((vector_size(4 * HC_W)));

V_INLINE vb v_load_bytes(const uint8_t *p) {
    vb v;
    memcpy(&v, p, sizeof v);
    return v;
}

V_INLINE vb v_low_nibbles(vb v) { return v & 15; }

V_INLINE vb v_high_nibbles(vb v) { return (vb)((vu)v >> 4) & 15; }

/* Whether v_dot takes HC_I8_ZERO off bytes that are not small; else who sums has to. */
#if defined(__AVX512VNNI__)
#define HC_DOT_TAKES_ZERO 0
#else
#define HC_DOT_TAKES_ZERO 1
#endif

/* Whether sums of products of small weights fit 16 bits for a while: v_add_pairs takes half of the instructions of v_dot. */
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
#define HC_HAS_PAIRS 1
#define HC_MOST_PAIRED 16 /* inputs: their products with weights up to 24, two a lane and step, are less than 2^15 */
#else
#define HC_HAS_PAIRS 0
#endif

/* sum + the four products of each lane; are_small: all of w are below 128. */
V_INLINE vi v_dot(vi sum, vb w, const int8_t *x, const int are_small) {
    int32_t four;
    memcpy(&four, x, sizeof four);
#if defined(__AVX512VNNI__)
    (void)are_small;
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(four));
#elif defined(__AVX2__)
    __m256i size = (__m256i)w, all = _mm256_set1_epi32(four);
    if (!are_small) { /* sums of two products fit 16 bits if the first factor is no more than 128 */
        __m256i value = _mm256_xor_si256(size, _mm256_set1_epi8((char)HC_I8_ZERO));
        size = _mm256_abs_epi8(value);
        all = _mm256_sign_epi8(all, value);
    }
    return sum + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(size, all), _mm256_set1_epi16(1));
#elif defined(__aarch64__)
    int8x16_t value = (int8x16_t)(are_small ? w : w ^ HC_I8_ZERO), all = vreinterpretq_s8_s32(vdupq_n_s32(four));
#if defined(__ARM_FEATURE_DOTPROD)
    return (vi)vdotq_s32((int32x4_t)sum, value, all);
#else
    int16x8_t low = vmull_s8(vget_low_s8(value), vget_low_s8(all)), high = vmull_high_s8(value, all);
    return sum + (vi)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#endif
#elif defined(__x86_64__)
    __m128i value = (__m128i)(are_small ? w : w ^ HC_I8_ZERO), all = _mm_set1_epi32(four);
    __m128i even = _mm_madd_epi16(_mm_srai_epi16(_mm_slli_epi16(value, 8), 8), _mm_srai_epi16(_mm_slli_epi16(all, 8), 8));
    return sum + (vi)even + (vi)_mm_madd_epi16(_mm_srai_epi16(value, 8), _mm_srai_epi16(all, 8));
#else
    for (int lane = 0; lane < HC_W; lane++)
        for (int i = 0; i < 4; i++)
            sum[lane] += (are_small ? w[lane * 4 + i] : w[lane * 4 + i] - HC_I8_ZERO) * x[i];
    return sum;
#endif
}

#if HC_HAS_PAIRS
/* Sums of two products in each 16 bits + those of small weights. */
V_INLINE __m256i v_add_pairs(__m256i pairs, vb w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm256_add_epi16(pairs, _mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(four)));
}

/* sum + both sums of each lane. */
V_INLINE vi v_add_paired(vi sum, __m256i pairs) { return sum + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
#endif

/* To the nearest, ties to the even one. */
V_INLINE vi v_round(vf v) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__)
    return (vi)_mm256_cvtps_epi32((__m256)v);
#elif defined(__x86_64__)
    return (vi)_mm_cvtps_epi32((__m128)v);
#elif defined(__aarch64__)
    return (vi)vcvtnq_s32_f32((float32x4_t)v);
#else
    vi result;
    for (int lane = 0; lane < HC_W; lane++)
        result[lane] = (int32_t)lrintf(v[lane]);
    return result;
#endif
}

/* Whole numbers of -128..127 as bytes. */
V_INLINE void v_store_as_bytes(int8_t *p, vi v) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(__AVX2__)
    __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    _mm_storel_epi64((__m128i *)(void *)p, _mm_packs_epi16(halves, halves));
#else
    for (int lane = 0; lane < HC_W; lane++)
        p[lane] = (int8_t)v[lane];
#endif
}

V_INLINE vi v_greater(vi a, vi b) {
#if defined(__AVX512F__)
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    vi mask = a > b;
    return (a & mask) | (b & ~mask);
#endif
}

V_INLINE int32_t v_greatest(vi v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t greatest = v[0];
    for (int lane = 1; lane < HC_W; lane++)
        greatest = v[lane] > greatest ? v[lane] : greatest;
    return greatest;
#endif
}

V_INLINE int32_t v_sum_ints(vi v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t sum = 0;
    for (int lane = 0; lane < HC_W; lane++)
        sum += v[lane];
    return sum;
#endif
}

#endif
