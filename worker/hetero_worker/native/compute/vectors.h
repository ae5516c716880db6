/* Vectors as wide as the registers of the instruction set (HC_W floats), and what kernels compute with them: compilers keep
 * wider ones in memory, at a tenth of the speed. Where a product goes into a sum, v_fma says so: a row has the same bits in
 * whatever loop it is in. */
#ifndef HETERO_VECTORS_H
#define HETERO_VECTORS_H

#include "isa.h"

#if defined(__AVX512F__)
#define HC_W 16
#elif defined(__AVX2__)
#define HC_W 8
#else
#define HC_W 4
#endif
#define HC_LINE 64 /* bytes of a line of a cache */

typedef float vf __attribute__((vector_size(4 * HC_W)));
typedef int32_t vi __attribute__((vector_size(4 * HC_W)));
typedef uint32_t vu __attribute__((vector_size(4 * HC_W)));
typedef uint16_t vh __attribute__((vector_size(2 * HC_W)));

#define V_INLINE static inline __attribute__((always_inline))

V_INLINE vf v_load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

V_INLINE void v_store(float *p, vf v) { memcpy(p, &v, sizeof v); }

V_INLINE vf v_all(float x) { return x - (vf){0}; }

V_INLINE vi v_all_of(int32_t x) { return x - (vi){0}; }

V_INLINE vf v_bits(vi bits) { return (vf)bits; }

/* a where the mask has all bits, b where it has none. */
V_INLINE vf v_choose(vi mask, vf a, vf b) { return v_bits((mask & (vi)a) | (~mask & (vi)b)); }

/* Whether a mask has any bits; each lane has all or none. */
V_INLINE int v_any(vi mask) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)mask) != 0;
#elif defined(__aarch64__)
    return vmaxvq_u32((uint32x4_t)mask) != 0;
#else
    int32_t any = 0;
    for (int lane = 0; lane < HC_W; lane++)
        any |= mask[lane];
    return any != 0;
#endif
}

/* a * b + c, in one rounding if the machine can. */
V_INLINE vf v_fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* The larger or smaller one; b, if either is no number. */
V_INLINE vf v_max(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return v_choose(a > b, a, b);
#endif
}

V_INLINE vf v_min(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return v_choose(a < b, a, b);
#endif
}

/* The first `count` < HC_W floats, zeros behind; and the other way. Nothing else is touched. */
V_INLINE vf v_load_some(const float *p, uint64_t count) {
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), p);
#else
    float x[HC_W] = {0};
    memcpy(x, p, count * sizeof *x);
    return v_load(x);
#endif
}

V_INLINE void v_store_some(float *p, vf v, uint64_t count) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << count) - 1), (__m512)v);
#else
    memcpy(p, &v, count * sizeof *p);
#endif
}

V_INLINE vf v_load_up_to(const float *p, uint64_t count) { return count < HC_W ? v_load_some(p, count) : v_load(p); }

V_INLINE void v_store_up_to(float *p, vf v, uint64_t count) {
    if (count < HC_W)
        v_store_some(p, v, count);
    else
        v_store(p, v);
}

V_INLINE vf v_widen(vh bits) {
#if defined(__aarch64__)
    return (vf)((vu)vmovl_u16((uint16x4_t)bits) << 16);
#else
    return (vf)(__builtin_convertvector(bits, vu) << 16);
#endif
}

/* Rounded to nearest, ties to even; NaN stays NaN. */
V_INLINE vh v_narrow(vf v) {
    vu bits = (vu)v, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
    vu is_nan = (vu)(v != v), narrow = (quiet & is_nan) | (rounded & ~is_nan);
#if defined(__aarch64__)
    return (vh)vmovn_u32((uint32x4_t)narrow);
#else
    return __builtin_convertvector(narrow, vh);
#endif
}

V_INLINE vf v_widen_f16(vh bits) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__AVX2__)
    return (vf)_mm256_cvtph_ps((__m128i)bits);
#elif defined(__aarch64__)
    return (vf)vcvt_f32_f16((float16x4_t)bits);
#else
    vf v = {0};
    for (int i = 0; i < HC_W; i++)
        v[i] = hc_half_to_float(bits[i]);
    return v;
#endif
}

/* Rounded to nearest, ties to even; what is beyond the largest number becomes it, so that nothing that a cache keeps is infinite:
 * tokens that a row does not see are summed with weight 0. NaN stays NaN. */
V_INLINE vh v_narrow_f16(vf v) {
    v = v_min(v_all(65504.0f), v_max(v_all(-65504.0f), v));
#if defined(__AVX512F__)
    return (vh)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
    return (vh)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
    return (vh)vcvt_f16_f32((float32x4_t)v);
#else
    vh bits = {0};
    for (int i = 0; i < HC_W; i++)
        bits[i] = hc_float_to_half(v[i]);
    return bits;
#endif
}

V_INLINE vf v_widen_as(vh bits, uint64_t type) { return type == HC_F16 ? v_widen_f16(bits) : v_widen(bits); }

V_INLINE vh v_narrow_as(vf v, uint64_t type) { return type == HC_F16 ? v_narrow_f16(v) : v_narrow(v); }

/* HC_W numbers of an activation or of a cache, or the first `count` with zeros behind; and the other way. */
V_INLINE vf v_load_as(const void *p, uint64_t type) {
    if (type == HC_F32)
        return v_load(p);
    vh bits;
    memcpy(&bits, p, sizeof bits);
    return v_widen_as(bits, type);
}

V_INLINE void v_store_as(void *p, vf v, uint64_t type) {
    if (type == HC_F32) {
        v_store(p, v);
        return;
    }
    vh bits = v_narrow_as(v, type);
    memcpy(p, &bits, sizeof bits);
}

V_INLINE vf v_load_up_to_as(const void *p, uint64_t count, uint64_t type) {
    if (type == HC_F32)
        return v_load_up_to(p, count);
    if (count >= HC_W)
        return v_load_as(p, type);
    vh bits = {0};
    memcpy(&bits, p, count * sizeof(uint16_t));
    return v_widen_as(bits, type);
}

V_INLINE void v_store_up_to_as(void *p, vf v, uint64_t count, uint64_t type) {
    if (type == HC_F32) {
        v_store_up_to(p, v, count);
        return;
    }
    vh bits = v_narrow_as(v, type);
    if (count < HC_W)
        memcpy(p, &bits, count * sizeof(uint16_t));
    else
        memcpy(p, &bits, sizeof bits);
}

/* Calls a kernel's loop with the activations' type as a constant: V_TYPED(type, f, a, b) is f(a, b, type). */
#define V_TYPED(type, function, ...)                  \
    do {                                              \
        if ((type) == HC_BF16)                        \
            function(__VA_ARGS__, (uint64_t)HC_BF16); \
        else                                          \
            function(__VA_ARGS__, (uint64_t)HC_F32);  \
    } while (0)

/* V_TYPED for the type of a cache. */
#define V_CACHED(type, function, ...)                \
    do {                                             \
        if ((type) == HC_F16)                        \
            function(__VA_ARGS__, (uint64_t)HC_F16); \
        else                                         \
            V_TYPED(type, function, __VA_ARGS__);    \
    } while (0)

#if defined(__clang__)
#define V_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else /* GCC before 12 has no other */
#define V_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif
#if HC_W == 16
#define V_LOW(a, b) V_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define V_HIGH(a, b) V_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define V_COUNTING ((vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#elif HC_W == 8
#define V_LOW(a, b) V_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define V_HIGH(a, b) V_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define V_COUNTING ((vi){0, 1, 2, 3, 4, 5, 6, 7})
#else
#define V_LOW(a, b) V_SHUFFLE(a, b, 0, 4, 1, 5)
#define V_HIGH(a, b) V_SHUFFLE(a, b, 2, 6, 3, 7)
#define V_COUNTING ((vi){0, 1, 2, 3})
#endif

/* HC_W vectors as the columns of what they were the rows of: log2(HC_W) perfect shuffles. */
V_INLINE void v_transpose(vf v[HC_W]) {
    vf shuffled[HC_W];
#pragma GCC unroll 4
    for (int step = 1; step < HC_W; step *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < HC_W / 2; i++) {
            shuffled[2 * i] = V_LOW(v[i], v[i + HC_W / 2]);
            shuffled[2 * i + 1] = V_HIGH(v[i], v[i + HC_W / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < HC_W; i++)
            v[i] = shuffled[i];
    }
}

/* The sum of the lanes, and the largest, in one order: a half is taken to the other until one is left. */
V_INLINE float v_sum(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float x[HC_W];
    memcpy(x, &v, sizeof x);
    for (int half = HC_W / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            x[i] += x[i + half];
    return x[0];
#endif
}

V_INLINE float v_largest(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float x[HC_W];
    memcpy(x, &v, sizeof x);
    for (int half = HC_W / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
    return x[0];
#endif
}

/* e to the x, within 2 units in the last place. With x = n ln 2 + r and |r| <= ln 2 / 2, it is 2^n (1 + r + r^2 q(r)).
 * What is less than -87.3 gives 0, exactly; what is more than 88.3 what 88.3 gives; what is no number stays so. */
V_INLINE vf v_exp(vf x) {
    const vf lowest = v_all(-87.3f), highest = v_all(88.3f), rounding = v_all(0x1.8p23f);
    vf kept = v_min(highest, v_max(lowest, x));
    vf shifted = v_fma(kept, v_all(0x1.715476p0f), rounding); /* its last bits are n */
    vf n = shifted - rounding;
    vf r = v_fma(n, v_all(-0x1.62e4p-1f), kept);
    r = v_fma(n, v_all(-0x1.7f7d1cp-20f), r);
    vf q = v_fma(v_all(0.00139337332f), r, v_all(0.00836323538f));
    q = v_fma(q, r, v_all(0.0416664642f));
    q = v_fma(q, r, v_all(0.166665766f));
    q = v_fma(q, r, v_all(0.5f));
    vf power = v_fma(q, r * r, r) + 1.0f;
#if defined(__AVX512F__)
    __mmask16 is_some = _mm512_cmp_ps_mask((__m512)x, (__m512)lowest, _CMP_NLT_UQ);
    return (vf)_mm512_maskz_scalef_ps(is_some, (__m512)power, (__m512)n);
#else
    vf two_to_n = v_bits(((vi)shifted - (vi)rounding + 127) << 23);
    return v_bits(~(x < lowest) & (vi)(power * two_to_n));
#endif
}

V_INLINE vf v_silu(vf x) { return x / (1.0f + v_exp(-x)); }

/* x by its sign, where |x| is large: 1 - 2 / (e^2|x| + 1); elsewhere x + x^3 q(x^2). */
V_INLINE vf v_tanh(vf x) {
    const vi sign = v_all_of(INT32_MIN);
    vf size = v_bits(~sign & (vi)x), square = x * x;
    vf q = v_fma(v_all(-0.00610494788f), square, v_all(0.0210036411f));
    q = v_fma(q, square, v_all(-0.0538524974f));
    q = v_fma(q, square, v_all(0.133327823f));
    q = v_fma(q, square, v_all(-0.333333291f));
    vf small = v_fma(q * square, x, x);
    vf large = 1.0f - 2.0f / (v_exp(size + size) + 1.0f);
    return v_choose(size < v_all(0.625f), small, v_bits((vi)large | (sign & (vi)x)));
}

#endif
