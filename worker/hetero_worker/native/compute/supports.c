/* Whether this processor has what the kernels are compiled for. Compiled without their flags. */
#define HC_SUPPORTS(isa) hc_supports_##isa

int HC_SUPPORTS(generic)(void);
int HC_SUPPORTS(avx2)(void);
int HC_SUPPORTS(avx512)(void);
int HC_SUPPORTS(avx512_bf16)(void);

int HC_SUPPORTS(generic)(void) { return 1; }

#if defined(__x86_64__)
#include <cpuid.h>

/* Not every compiler knows its name for __builtin_cpu_supports. */
static int has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

int HC_SUPPORTS(avx2)(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

int HC_SUPPORTS(avx512)(void) {
    return HC_SUPPORTS(avx2)() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

/* Nor is this one's name known to every compiler. */
int HC_SUPPORTS(avx512_bf16)(void) {
    unsigned a, b, c, d;
    return HC_SUPPORTS(avx512)() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}
#endif
