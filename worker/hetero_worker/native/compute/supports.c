/* Whether this processor has what the kernels are compiled for. Compiled without their flags. */
#define _GNU_SOURCE
#define HC_SUPPORTS(isa) hc_supports_##isa

int HC_SUPPORTS(generic)(void);
int HC_SUPPORTS(avx2)(void);
int HC_SUPPORTS(avx512)(void);
int HC_SUPPORTS(avx512_bf16)(void);
int HC_SUPPORTS(amx)(void);
int HC_SUPPORTS(amx_emulated)(void);
int HC_SUPPORTS(dotprod)(void);

int HC_SUPPORTS(generic)(void) { return 1; }

#if defined(__x86_64__)
#include <cpuid.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ASK_FOR_STATE 0x1023 /* ARCH_REQ_XCOMP_PERM of Linux 5.16: tiles are refused to processes that have not asked */
#define TILE_DATA 18         /* XFEATURE_XTILEDATA */

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

/* The permission is the process's, and that of its children. */
int HC_SUPPORTS(amx)(void) {
    static _Atomic int known; /* 0: not yet; 1: no; 2: yes */
    unsigned a, b, c, d;
    if (!atomic_load(&known)) {
        int has = HC_SUPPORTS(avx512_bf16)() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) &&
                  (d >> 24 & 1) && (d >> 25 & 1) && !syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA);
        atomic_store(&known, has ? 2 : 1);
    }
    return atomic_load(&known) == 2;
}

int HC_SUPPORTS(amx_emulated)(void) { return HC_SUPPORTS(avx2)(); }
#elif defined(__aarch64__)
#include <sys/auxv.h>

#define DOT_PRODUCTS (1ul << 20) /* HWCAP_ASIMDDP */

int HC_SUPPORTS(dotprod)(void) { return (getauxval(AT_HWCAP) & DOT_PRODUCTS) != 0; }
#endif
