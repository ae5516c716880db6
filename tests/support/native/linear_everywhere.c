/* Products of every format on every instruction set of the processor, beside sums of doubles; for machines without Python,
 * such as emulated ones. Sets of one width of vectors give the same bits. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "packing.h"

#define OUT 70
#define IN 96
#define GROUP 32
#define MOST_ROWS 17

static uint32_t state = 1;

/* In [-1, 1). */
static float draw(void) {
    state = state * 1664525u + 1013904223u;
    return (float)(int32_t)state * 0x1p-31f;
}

static float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float half_of(uint16_t bits) { /* of normal ones */
    return of_bits((uint32_t)(bits & 0x8000) << 16 | (((uint32_t)(bits & 0x7fff) << 13) + (112u << 23)));
}

static float small_of(uint64_t format, uint8_t bits) { /* 8-bit floats of 4 and 3 bits, 4-bit ones of 2 and 1 */
    static const float fours[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    if (format == HC_F4)
        return bits & 8 ? -fours[bits & 7] : fours[bits & 7];
    int exponent = bits >> 3 & 15, rest = bits & 7;
    float size = exponent ? ldexpf(1.0f + (float)rest / 8, exponent - 7) : ldexpf((float)rest, -9);
    return bits & 128 ? -size : size;
}

typedef struct {
    hc_weight weight;
    char values[OUT * IN * 4];
    float scales[OUT * IN / GROUP], minima[OUT * IN / GROUP], meant[OUT * IN];
} matrix;

/* A number as it is stored, and what it means. */
static void store(matrix *of, uint64_t i, uint64_t group) {
    uint64_t format = of->weight.format;
    uint32_t bits = bits_of(draw());
    float scale = of->scales[group], minimum = of->weight.minima ? of->minima[group] : 0;
    if (format == HC_F32) {
        memcpy(of->values + 4 * i, &bits, 4);
        of->meant[i] = of_bits(bits);
    } else if (format == HC_BF16 || format == HC_F16) {
        uint16_t half = format == HC_BF16 ? (uint16_t)(bits >> 16) : (uint16_t)(0x3000u | (bits >> 8 & 0x8fffu));
        memcpy(of->values + 2 * i, &half, 2);
        of->meant[i] = format == HC_BF16 ? of_bits((uint32_t)half << 16) : half_of(half);
    } else {
        uint8_t byte = (uint8_t)(format == HC_I4 || format == HC_F4 ? bits >> 8 & 15 : bits >> 8 & 127);
        of->values[i] = (char)byte;
        if (format == HC_F8 || format == HC_F4)
            of->meant[i] = small_of(format, byte) * scale * (format == HC_F8 ? 1.0f / 256 : 2);
        else
            of->meant[i] = ((float)byte - (format == HC_I4 && !of->weight.minima ? HC_I4_ZERO : 0)) * scale + minimum;
    }
}

static void run(hc_team *team, const hc_op *op) {
    int status;
    hc_run(team, &op, 0, 1, &status);
}

/* Packs a random matrix; meant has its numbers. */
static void pack(hc_team *team, matrix *of, uint64_t format, int has_minima) {
    int is_grouped = format >= HC_I8;
    of->weight = (hc_weight){format, OUT, IN, is_grouped ? GROUP : 0, calloc(96 * IN, 4),
                             is_grouped ? calloc(96 * IN, 4) : NULL, has_minima ? calloc(96 * IN, 4) : NULL};
    for (int i = 0; i < OUT * IN / GROUP; i++) { /* numbers that 16 bits hold */
        of->scales[i] = ldexpf(1.0f + (float)(i % 8) / 8, -7);
        of->minima[i] = -(float)(i % 5) / 8;
    }
    for (uint64_t i = 0; i < OUT * IN; i++)
        store(of, i, i / IN * (IN / GROUP) + i % IN / GROUP);
    hc_pack_op op = {{HC_PACK, OUT}, &of->weight, of->values, IN, is_grouped ? of->scales : NULL, has_minima ? of->minima : NULL};
    run(team, &op.op);
}

/* The largest error, as a part of the sum of all sizes. */
static double check(const matrix *of, const float *x, const float *y, uint64_t rows) {
    double worst = 0;
    for (uint64_t row = 0; row < rows; row++)
        for (uint64_t out = 0; out < OUT; out++) {
            double sum = 0, size = 0;
            for (uint64_t in = 0; in < IN; in++) {
                double product = (double)of->meant[out * IN + in] * x[row * IN + in];
                sum += product;
                size += fabs(product);
            }
            double error = fabs(sum - y[row * OUT + out]) / size;
            worst = error > worst ? error : worst;
        }
    return worst;
}

int main(void) {
    static const uint64_t rows[] = {1, 2, 5, MOST_ROWS};
    static float x[MOST_ROWS * IN], y[MOST_ROWS * OUT], first[MOST_ROWS * OUT];
    hc_team *team = hc_team_new(1, NULL, 0);
    int failed = 0;
    for (int i = 0; i < MOST_ROWS * IN; i++)
        x[i] = draw();
    for (uint64_t format = 0; format < HC_FORMATS; format++)
        for (int has_minima = 0; has_minima <= (format == HC_I8 || format == HC_I4); has_minima++) {
            matrix *of = calloc(1, sizeof *of);
            pack(team, of, format, has_minima);
            for (uint64_t number = 0; number < sizeof rows / sizeof *rows; number++)
                for (uint64_t set = 0; hc_isa(set); set++) {
                    hc_linear_op op = {{HC_LINEAR, rows[number]}, &of->weight, HC_F32, HC_F32, x, IN, NULL, y, OUT, NULL};
                    hc_use(hc_isa(set));
                    op.scratch = aligned_alloc(64, (hc_scratch_bytes(&op.op, 1) + 127) / 64 * 64);
                    run(team, &op.op);
                    double error = check(of, x, y, rows[number]);
                    int differs = set && memcmp(first, y, rows[number] * OUT * sizeof *y);
                    if (!set)
                        memcpy(first, y, sizeof y);
                    int is_wrong = !(error < (hc_is_quantized(&of->weight) ? 2e-2 : 1e-6)) || (SAME_BITS && differs);
                    failed |= is_wrong;
                    printf("%s format %d%s, %d rows: error %.1e%s%s\n", hc_isa(set), (int)format, has_minima ? " with minima" : "",
                           (int)rows[number], error, differs ? ", other bits" : "", is_wrong ? " WRONG" : "");
                    free(op.scratch);
                }
        }
    return failed;
}
