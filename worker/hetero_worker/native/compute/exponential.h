/* An exponential of the same bits on every instruction set, for kernels that round products before they are added
 * (build.py, _ROUNDED); v_exp is for others. */
#ifndef HETERO_EXPONENTIAL_H
#define HETERO_EXPONENTIAL_H

#include "vectors.h"

/* e to the x, of x no further from 0 than 86: with x = n ln 2 + r it is 2^n (1 + r + r^2 q(r)). What is no number stays so. */
V_INLINE vf hc_exponential(vf x) {
    const vf lowest = v_all(-86.0f), highest = v_all(86.0f), rounding = v_all(0x1.8p23f);
    x = v_choose(x < lowest, lowest, x);
    x = v_choose(x > highest, highest, x);
    vf shifted = x * 0x1.715476p0f + rounding; /* its last bits are n */
    vf n = shifted - rounding;
    vf r = x - n * 0x1.62e4p-1f;
    r = r - n * 0x1.7f7d1cp-20f;
    vf q = r * 0.00139337332f + 0.00836323538f;
    q = q * r + 0.0416664642f;
    q = q * r + 0.166665766f;
    q = q * r + 0.5f;
    vf power = q * (r * r) + r + 1.0f;
    vi exponent = ((vi)shifted - (vi)rounding + 127) << 23;
    return power * (vf)exponent;
}

#endif
