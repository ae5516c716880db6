/* What an instruction set is to its kernels: names, intrinsics, and numbers one by one. Vectors are in vectors.h.
 *
 * The build compiles each kernel file once an instruction set, with HC_ISA defined as its name (generic, avx2, avx512,
 * avx512_bf16). Of a set with tiles (amx, amx_emulated) it compiles only what multiplies with them; all else is that of
 * HC_BASE. On aarch64 generic has NEON, and dotprod its dot products of bytes as well. What vector extensions do not say
 * (widening 16-bit floats, dot products of bytes) is in intrinsics, with plain C for the rest. */
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

#define HC_LANES 16 /* columns and inputs come in multiples of it, whatever the width of vectors */

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

/* Rounded to nearest, ties to even; where no instruction does it. */
static inline uint16_t hc_float_to_half(float value) {
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
}

/* Bytes of a number of an activation. */
static inline uint64_t hc_width_of(uint64_t type) { return type == HC_F32 ? 4 : 2; }

/* The number at `index` of an activation. */
static inline const void *hc_at(const void *p, uint64_t index, uint64_t type) {
    return (const char *)p + index * hc_width_of(type);
}

static inline void *hc_to(void *p, uint64_t index, uint64_t type) { return (char *)p + index * hc_width_of(type); }

#endif
