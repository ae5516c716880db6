/* What kernels are written in: vectors of 16 floats, as the compiler has them for the instruction set it compiles for.
 *
 * The build compiles each kernel file once an instruction set, with HC_ISA defined as its name (generic, avx2, avx512,
 * avx512_bf16). Of a set with tiles (amx, amx_emulated) it compiles only what multiplies with them; all else is that of
 * HC_BASE. On aarch64 generic has NEON. What vector extensions do not say (widening 16-bit floats, dot products of
 * bytes) is here in intrinsics, with plain C for the rest. */
#ifndef HETERO_ISA_H
#define HETERO_ISA_H

#include <math.h>
#include <string.h>

#include "kernel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define HC_JOIN_(a, b) a##_##b
#define HC_JOIN(a, b) HC_JOIN_(a, b)
#define HC_NAME(function) HC_JOIN(function, HC_ISA)
#ifndef HC_BASE
#define HC_BASE HC_ISA
#endif
#define HC_BASE_NAME(function) HC_JOIN(function, HC_BASE)
#define HC_TEXT_(a) #a
#define HC_TEXT(a) HC_TEXT_(a)

#define HC_LANES 16

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

static inline f32x16 hc_load(const float *p) {
    f32x16 v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void hc_store(float *p, f32x16 v) { memcpy(p, &v, sizeof v); }

static inline f32x16 hc_all(float x) { return (f32x16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

/* a * b + c; one rounding where the machine has it. */
static inline f32x16 hc_fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c; /* contracted by the compiler (-ffp-contract=fast) */
#endif
}

/* The sum of the lanes, in one order on all machines. */
static inline float hc_sum(f32x16 v) {
    float x[HC_LANES];
    memcpy(x, &v, sizeof x);
    for (int half = HC_LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            x[i] += x[i + half];
    return x[0];
}

/* The first `count` of 16 floats, zeros behind; and the other way. */
static inline f32x16 hc_load_some(const float *p, uint64_t count) {
    float x[HC_LANES] = {0};
    memcpy(x, p, count * sizeof *x);
    return hc_load(x);
}

static inline void hc_store_some(float *p, f32x16 v, uint64_t count) { memcpy(p, &v, count * sizeof *p); }

static inline f32x16 hc_widen_bf16(const uint16_t *p) {
    u16x16 bits;
    memcpy(&bits, p, sizeof bits);
    return (f32x16)(__builtin_convertvector(bits, u32x16) << 16);
}

/* Rounded to nearest, ties to even; NaN stays NaN. */
static inline u16x16 hc_narrow_bf16(f32x16 v) {
    u32x16 bits = (u32x16)v, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
    u32x16 is_nan = (u32x16)(v != v);
    return __builtin_convertvector((quiet & is_nan) | (rounded & ~is_nan), u16x16);
}

static inline float hc_half_to_float(uint16_t half) {
#if defined(__F16C__)
    return _cvtsh_ss(half);
#elif defined(__aarch64__)
    __fp16 value;
    memcpy(&value, &half, sizeof value);
    return (float)value;
#else
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = half & 0x7fffu, bits;
    float value;
    if (rest >= 0x7c00u) { /* infinite, or none */
        bits = sign | 0x7f800000u | (rest & 0x3ffu) << 13;
    } else {
        value = (float)rest * 0x1p-24f; /* right for subnormal ones, which count in 2^-24 */
        memcpy(&bits, &value, sizeof bits);
        bits = rest < 0x400u ? sign | bits : sign | ((rest << 13) + 0x38000000u);
    }
    memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

/* Rounded to nearest, ties to even. */
static inline uint16_t hc_float_to_half(float value) {
#if defined(__F16C__)
    return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
    __fp16 half = (__fp16)value;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
#else
    uint32_t bits, size, rest;
    memcpy(&bits, &value, sizeof bits);
    size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) { /* no number */
        rest = 0x7e00u;
    } else if (size >= 143u << 23) { /* 65,536 and more */
        rest = 0x7c00u;
    } else if (size < 113u << 23) { /* subnormal ones count in 2^-24, as floats near 0.5 do in 2^-24 */
        float small, half = 0.5f;
        uint32_t base;
        memcpy(&small, &size, sizeof small);
        small += half;
        memcpy(&rest, &small, sizeof rest);
        memcpy(&base, &half, sizeof base);
        rest -= base;
    } else {
        rest = (size - (112u << 23) + 0xfffu + (size >> 13 & 1u)) >> 13;
    }
    return (uint16_t)((bits >> 16 & 0x8000u) | rest);
#endif
}

static inline f32x16 hc_widen_f16(const uint16_t *p) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
    float x[HC_LANES];
    for (int i = 0; i < HC_LANES; i++)
        x[i] = hc_half_to_float(p[i]);
    return hc_load(x);
#endif
}

/* Bytes of a number of an activation. */
static inline uint64_t hc_width_of(uint64_t type) { return type == HC_F32 ? 4 : 2; }

/* The number at `index` of an activation. */
static inline const void *hc_at(const void *p, uint64_t index, uint64_t type) {
    return (const char *)p + index * hc_width_of(type);
}

static inline void *hc_to(void *p, uint64_t index, uint64_t type) { return (char *)p + index * hc_width_of(type); }

/* The first `count` of 16 numbers of an activation, zeros behind; and the other way. */
static inline f32x16 hc_load_as(const void *p, uint64_t count, uint64_t type) {
    if (type == HC_F32)
        return count == HC_LANES ? hc_load(p) : hc_load_some(p, count);
    uint16_t bits[HC_LANES] = {0};
    if (count == HC_LANES)
        return hc_widen_bf16(p);
    memcpy(bits, p, count * sizeof *bits);
    return hc_widen_bf16(bits);
}

static inline void hc_store_as(void *p, f32x16 v, uint64_t count, uint64_t type) {
    u16x16 bits;
    if (type == HC_F32) {
        if (count == HC_LANES)
            hc_store(p, v);
        else
            hc_store_some(p, v, count);
        return;
    }
    bits = hc_narrow_bf16(v);
    if (count == HC_LANES)
        memcpy(p, &bits, sizeof bits);
    else
        memcpy(p, &bits, count * sizeof(uint16_t));
}

#endif
