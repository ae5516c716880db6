/* Gumbel noise of draws, by the rule of sampling/noise.py: to the last bit what torch's operators make of it, on every
 * instruction set. Whoever includes it rounds products before they are added (build.py, _ROUNDED). */
#ifndef HETERO_NOISE_H
#define HETERO_NOISE_H

#include "vectors.h"

#define HC_PER_COUNTER 8u      /* vocabulary rows, a word of 32 bits each */
#define HC_COARSE 256.0f       /* numbers below have a fraction of their own */
#define HC_FRACTION_KEY (1ull << 63) /* set in the position, it keys the fractions */

/* What a draw's noise is keyed by. */
typedef struct {
    uint64_t seed, position;
} hc_noise_key;

/* Philox4x64-10: four words of a counter, which counts on before the first of them. */
V_INLINE void hc_philox(hc_noise_key key, uint64_t counter, uint64_t words[4]) {
    uint64_t a = counter + 1, b = 0, c = 0, d = 0;
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        unsigned __int128 of_a = (unsigned __int128)a * 0xD2E7470EE14C6C93u;
        unsigned __int128 of_c = (unsigned __int128)c * 0xCA5A826395121157u;
        a = (uint64_t)(of_c >> 64) ^ b ^ key.seed;
        b = (uint64_t)of_c;
        c = (uint64_t)(of_a >> 64) ^ d ^ key.position;
        d = (uint64_t)of_a;
        key.seed += 0x9E3779B97F4A7C15u;
        key.position += 0xBB67AE8584CAA73Bu;
    }
    words[0] = a, words[1] = b, words[2] = c, words[3] = d;
}

/* Words as numbers between 0 and 2^32, which coarse ones have a fraction for. */
V_INLINE vf hc_numbers(const uint32_t *words) {
    vu bits;
    memcpy(&bits, words, sizeof bits);
    vf high = __builtin_convertvector((vi)(bits >> 16), vf), low = __builtin_convertvector((vi)(bits & 0xffff), vf);
    return high * 65536.0f + low + 0.5f; /* rounded as the word would be, then as the sum */
}

/* The number of a word, which is coarse, of a vocabulary row. */
static inline float hc_exact_number(uint32_t word, hc_noise_key key, uint64_t id) {
    uint64_t words[4];
    key.position |= HC_FRACTION_KEY;
    hc_philox(key, id, words);
    return (float)((double)word + ((double)words[0] + 0.5) * 0x1p-64);
}

/* The logarithm of x, which is normal and not negative; where that is within a root of 2 from 1, of 1 + `near`, which is x. */
V_INLINE vf hc_log(vf x, const vf *near) {
    vi bits = (vi)x, twos = (bits - 0x3f3504f3) >> 23;
    vf f = v_bits(bits - (twos << 23)) - 1.0f, n = __builtin_convertvector(twos, vf);
    if (near)
        f = v_choose(twos == 0, *near, f);
    vf square = f * f, p = f * 7.0376836292e-2f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    vf rest = p * (f * square) - n * 2.12194440e-4f - square * 0.5f;
    return f + rest + n * 0.693359375f;
}

/* -log(-log(1 - number / 2^32)). */
V_INLINE vf hc_gumbel(vf numbers) {
    vf minus_u = numbers * (-0x1p-32f * (1.0f - 0x1p-24f));
    return -hc_log(-hc_log(minus_u + 1.0f, &minus_u), NULL);
}

/* No less than hc_gumbel: -log(number / 2^32), whose logarithm lies above the chords that a float's bits are, and some more
 * than its roundings. */
V_INLINE vf hc_gumbel_bound(vf numbers) {
    return 110.212f - __builtin_convertvector((vi)numbers, vf) * (0.693147181f * 0x1p-23f);
}

#endif
