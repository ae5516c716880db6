/* Whole numbers as kernels multiply them: 64 bytes of weights, which are 16 lanes of four inputs each, with four signed
 * bytes of x. Sums are exact on every instruction set. */
#ifndef HETERO_BYTES_H
#define HETERO_BYTES_H

#include "isa.h"
#include "packing.h"

typedef uint8_t u8x64 __attribute__((vector_size(64)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

static inline u8x64 hc_load_bytes(const uint8_t *p) {
    u8x64 v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline i32x16 hc_all_ints(int32_t x) { return (i32x16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

static inline u8x64 hc_low_nibbles(u8x64 v) { return v & 15; }

static inline u8x64 hc_high_nibbles(u8x64 v) { return (u8x64)((u32x16)v >> 4) & 15; }

/* Whether hc_dot takes HC_I8_ZERO off bytes that are not small; else who sums has to. */
#if defined(__AVX512VNNI__)
#define HC_DOT_TAKES_ZERO 0
#else
#define HC_DOT_TAKES_ZERO 1
#endif

/* sum + the four products of each lane; are_small: all of w are below 128. */
static inline __attribute__((always_inline)) i32x16 hc_dot(i32x16 sum, u8x64 w, const int8_t *x, const int are_small) {
    int32_t four;
    memcpy(&four, x, sizeof four);
#if defined(__AVX512VNNI__)
    (void)are_small;
    return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(four));
#elif defined(__AVX2__)
    __m256i halves[2], sums[2], all = _mm256_set1_epi32(four), ones = _mm256_set1_epi16(1);
    memcpy(halves, &w, sizeof w);
    memcpy(sums, &sum, sizeof sum);
    for (int i = 0; i < 2; i++) {
        __m256i size = halves[i], signed_x = all;
        if (!are_small) { /* sums of two products fit 16 bits if the first factor is no more than 128 */
            __m256i value = _mm256_xor_si256(halves[i], _mm256_set1_epi8((char)HC_I8_ZERO));
            size = _mm256_abs_epi8(value);
            signed_x = _mm256_sign_epi8(all, value);
        }
        __m256i pairs = _mm256_madd_epi16(_mm256_maddubs_epi16(size, signed_x), ones);
        sums[i] = _mm256_add_epi32(sums[i], pairs);
    }
    memcpy(&sum, sums, sizeof sum);
    return sum;
#elif defined(__aarch64__)
    int32x4_t sums[4];
    int8x16_t values[4], all = vreinterpretq_s8_s32(vdupq_n_s32(four));
    memcpy(values, &w, sizeof w);
    memcpy(sums, &sum, sizeof sum);
    for (int i = 0; i < 4; i++) {
        int8x16_t value = are_small ? values[i] : veorq_s8(values[i], vdupq_n_s8((int8_t)HC_I8_ZERO));
#if defined(__ARM_FEATURE_DOTPROD)
        sums[i] = vdotq_s32(sums[i], value, all);
#else
        int16x8_t low = vmull_s8(vget_low_s8(value), vget_low_s8(all)), high = vmull_high_s8(value, all);
        sums[i] = vaddq_s32(sums[i], vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
    }
    memcpy(&sum, sums, sizeof sum);
    return sum;
#else
    for (int lane = 0; lane < HC_LANES; lane++)
        for (int i = 0; i < 4; i++)
            sum[lane] += (are_small ? w[lane * 4 + i] : w[lane * 4 + i] - HC_I8_ZERO) * x[i];
    return sum;
#endif
}

/* To the nearest, ties to the even one. */
static inline i32x16 hc_round(f32x16 v) {
#if defined(__AVX512F__)
    return (i32x16)_mm512_cvtps_epi32((__m512)v);
#else
    i32x16 result;
    for (int lane = 0; lane < HC_LANES; lane++)
        result[lane] = (int32_t)lrintf(v[lane]);
    return result;
#endif
}

/* a * b, rounded: never one with an addition that follows. */
static inline f32x16 hc_product(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_mul_ps((__m512)a, (__m512)b);
#else
    return a * b;
#endif
}

static inline i32x16 hc_greater(i32x16 a, i32x16 b) {
#if defined(__AVX512F__)
    return (i32x16)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
    i32x16 mask = a > b;
    return (a & mask) | (b & ~mask);
#endif
}

static inline int32_t hc_greatest(i32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t greatest = v[0];
    for (int lane = 1; lane < HC_LANES; lane++)
        greatest = v[lane] > greatest ? v[lane] : greatest;
    return greatest;
#endif
}

static inline int32_t hc_sum_ints(i32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t sum = 0;
    for (int lane = 0; lane < HC_LANES; lane++)
        sum += v[lane];
    return sum;
#endif
}

#endif
