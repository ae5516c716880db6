/* y = x · Wᵀ + bias for bfloat16 weights, by tiles (amx.h), whatever the number of rows.
 *
 * A tile's product takes bfloat16 only. float32 rows are split into three terms of 8 bits, which are bfloat16 and whose sum is
 * x to the last bit: products with all three are as exact as float32's. bfloat16 rows are one term. Infinite numbers and NaN
 * stay in the first term; subnormal numbers count as 0.
 *
 * A sum is made HC_PAIRED_INPUTS inputs at a time, term by term, in a float32 accumulator that stays in its tile: first
 * inputs of pairs by themselves, then second ones, then both together. It is the same for all numbers of rows.
 *
 * Rows of x are put together as tiles read them: [rows / 16][inputs / 32][term][row][32], first inputs of pairs above. As much
 * of them as stays in cache meets panel after panel. Where that is not all inputs of enough rows, to read the weights seldom,
 * it is a block of inputs, and sums of some panels are kept between one block and the next. */
#include "amx.h"
#include "linear.h"
#include "tiles.h"

extern hc_kernel HC_NAME(linear_tiles);

#define X_BYTES (512u * 1024)              /* of x that stay in the second cache, and meet panel after panel */
#define STEP_BYTES (HC_PAIRED_INPUTS * HC_PANEL * sizeof(uint16_t)) /* of a panel, for a tile's inputs */
#define ROW_BYTES (HC_VECTORS * HC_TILE_BYTES)                      /* of a panel, for a pair */
#define TERM_BYTES (HC_TILE_ROWS * HC_TILE_BYTES)

/* Tiles: four sums [rows][vector], two of rows, two of weights. */
#define SUM_00 0
#define SUM_01 1
#define SUM_10 2
#define SUM_11 3
#define X_0 4
#define X_1 5
#define W_0 6
#define W_1 7

/* Rows of x as tiles read them. */
typedef struct {
    const hc_linear_op *op;
    char *x;
    uint64_t count;    /* of rows, as they are put together: up to one tile's, or full tiles */
    uint64_t terms;
    uint64_t steps;    /* of HC_PAIRED_INPUTS inputs */
    uint64_t of_tile;  /* bytes */
} hc_rows;

static hc_rows rows_of(const hc_linear_op *op) {
    hc_rows rows = {.op = op, .count = hc_tile_rows(op->op.rows), .terms = hc_terms(op->type)};
    rows.steps = hc_stored_inputs(op->weight) / HC_PAIRED_INPUTS;
    rows.of_tile = rows.steps * rows.terms * TERM_BYTES;
    return rows;
}

/* Pairs of 32 inputs that are bfloat16 in the upper half of 32 bits, the first of a pair above. */
HC_INLINE void store_pairs(const u32x16 inputs[2], char *to) {
#if defined(__AVX512BW__)
    static const uint16_t HALVES[2 * HC_LANES] = {3,  1,  7,  5,  11, 9,  15, 13, 19, 17, 23, 21, 27, 25, 31, 29,
                                                  35, 33, 39, 37, 43, 41, 47, 45, 51, 49, 55, 53, 59, 57, 63, 61};
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16((__m512i)inputs[0], _mm512_loadu_si512(HALVES), (__m512i)inputs[1]));
#else
    uint32_t all[2 * HC_LANES];
    memcpy(all, inputs, sizeof all);
    for (int i = 0; i < HC_LANES; i++) {
        uint32_t pair = (all[2 * i] & 0xffff0000u) | all[2 * i + 1] >> 16;
        memcpy(to + i * sizeof pair, &pair, sizeof pair);
    }
#endif
}

/* Lanes that are infinite, or NaN. */
HC_INLINE u32x16 no_numbers(f32x16 x) { return (u32x16)(((u32x16)x & 0x7f800000) == 0x7f800000); }

HC_INLINE int has_any(u32x16 mask) {
    uint64_t any = 0, parts[sizeof mask / sizeof any];
    memcpy(parts, &mask, sizeof mask);
    for (uint64_t i = 0; i < sizeof mask / sizeof any; i++)
        any |= parts[i];
    return any != 0;
}

/* 32 inputs of a row, of which `count` exist, to all terms. What a term cuts off of a number is in the next ones; infinity
 * and NaN are the first term, NaN with a bit more lest it become infinity. */
HC_INLINE void put_inputs(const void *x, uint64_t count, const uint64_t type, char *to) {
    f32x16 v[2];
    for (uint64_t i = 0; i < 2; i++) {
        uint64_t left = count > i * HC_LANES ? count - i * HC_LANES : 0;
        v[i] = left ? hc_load_as(hc_at(x, i * HC_LANES, type), left < HC_LANES ? left : HC_LANES, type) : hc_all(0);
    }
    u32x16 odd[2] = {no_numbers(v[0]), no_numbers(v[1])};
    if (type == HC_F32 && has_any(odd[0] | odd[1])) {
        for (int i = 0; i < 2; i++) {
            u32x16 first = ((u32x16)v[i] & 0xffff0000) | ((u32x16)(v[i] != v[i]) & 0x400000);
            v[i] = (f32x16)((u32x16)v[i] & ~odd[i]);
            odd[i] &= first;
        }
    } else {
        odd[0] = odd[1] = (u32x16){0};
    }
    const uint64_t terms = hc_terms(type);
    for (uint64_t term = 0; term < terms; term++, to += TERM_BYTES) {
        u32x16 parts[2];
        for (int i = 0; i < 2; i++) {
            parts[i] = (u32x16)v[i] & 0xffff0000;
            v[i] = v[i] - (f32x16)parts[i];
            parts[i] |= term ? (u32x16){0} : odd[i];
        }
        store_pairs(parts, to);
    }
}

HC_INLINE void put_row(const hc_rows *rows, uint64_t row, const uint64_t type) {
    const hc_linear_op *op = rows->op;
    const void *x = row < op->op.rows ? hc_at(op->x, row * op->x_stride, type) : NULL;
    char *to = rows->x + row / HC_TILE_ROWS * rows->of_tile + row % HC_TILE_ROWS * HC_TILE_BYTES;
    for (uint64_t step = 0; step < rows->steps; step++, to += rows->terms * TERM_BYTES) {
        uint64_t begin = step * HC_PAIRED_INPUTS, left = op->weight->in - begin;
        if (x)
            put_inputs(hc_at(x, begin, type), left < HC_PAIRED_INPUTS ? left : HC_PAIRED_INPUTS, type, to);
        else
            for (uint64_t term = 0; term < rows->terms; term++)
                memset(to + term * TERM_BYTES, 0, HC_TILE_BYTES);
    }
}

static void put_rows(const hc_rows *rows, uint64_t begin, uint64_t end) {
    for (uint64_t row = begin; row < end; row++) {
        if (rows->op->type == HC_F32)
            put_row(rows, row, HC_F32);
        else
            put_row(rows, row, HC_BF16);
    }
}

/* A block of inputs: of a panel, and of rows of one or two tiles. */
typedef struct {
    const char *w, *x;
    uint64_t steps, of_tile;
    float *sums; /* [HC_HIGH_ROWS][HC_PANEL]: of the blocks before */
    hc_ahead ahead;
    hc_corner corner;
    int is_first, is_last;
} hc_piece;

HC_INLINE void multiply(const int tiles, const int terms, const hc_piece *piece, hc_amx *amx) {
    (void)amx;
    const uint64_t stride = HC_PANEL * sizeof(float);
    const char *w = piece->w, *x = piece->x;
    float *sums = piece->sums, *low = sums + HC_TILE_ROWS * HC_PANEL;
    if (piece->is_last)
        hc_ask_for_corner(&piece->corner, tiles * HC_TILE_ROWS, HC_VECTORS);
    if (piece->is_first) {
        HC_AMX_ZERO(amx, SUM_00);
        HC_AMX_ZERO(amx, SUM_01);
        if (tiles == 2) {
            HC_AMX_ZERO(amx, SUM_10);
            HC_AMX_ZERO(amx, SUM_11);
        }
    } else {
        HC_AMX_LOAD(amx, SUM_00, sums, stride);
        HC_AMX_LOAD(amx, SUM_01, sums + HC_LANES, stride);
        if (tiles == 2) {
            HC_AMX_LOAD(amx, SUM_10, low, stride);
            HC_AMX_LOAD(amx, SUM_11, low + HC_LANES, stride);
        }
    }
    for (uint64_t step = 0; step < piece->steps; step++, w += STEP_BYTES) {
        hc_ask_for(&piece->ahead, step * STEP_BYTES);
        HC_AMX_LOAD(amx, W_0, w, ROW_BYTES);
        HC_AMX_LOAD(amx, W_1, w + HC_TILE_BYTES, ROW_BYTES);
        HC_UNROLLED
        for (int term = 0; term < terms; term++, x += TERM_BYTES) {
            HC_AMX_LOAD(amx, X_0, x, HC_TILE_BYTES);
            HC_AMX_DOT_BF16(amx, SUM_00, X_0, W_0);
            HC_AMX_DOT_BF16(amx, SUM_01, X_0, W_1);
            if (tiles == 2) {
                HC_AMX_LOAD(amx, X_1, x + piece->of_tile, HC_TILE_BYTES);
                HC_AMX_DOT_BF16(amx, SUM_10, X_1, W_0);
                HC_AMX_DOT_BF16(amx, SUM_11, X_1, W_1);
            }
        }
    }
    HC_AMX_STORE(amx, SUM_00, sums, stride);
    HC_AMX_STORE(amx, SUM_01, sums + HC_LANES, stride);
    if (tiles == 2) {
        HC_AMX_STORE(amx, SUM_10, low, stride);
        HC_AMX_STORE(amx, SUM_11, low + HC_LANES, stride);
    }
    if (piece->is_last)
        hc_write_tile(&piece->corner, tiles * HC_TILE_ROWS, HC_VECTORS, (const f32x16 *)sums, 1, 1);
}

static void multiply_piece(uint64_t tiles, uint64_t terms, const hc_piece *piece, hc_amx *amx) {
    if (terms == 1 && tiles == 1)
        multiply(1, 1, piece, amx);
    else if (terms == 1)
        multiply(2, 1, piece, amx);
    else if (tiles == 1)
        multiply(1, 3, piece, amx);
    else
        multiply(2, 3, piece, amx);
}

/* What is gone through at a time: rows that are multiplied at once, inputs, panels. */
typedef struct {
    uint64_t high, steps, panels;
} hc_batch;

static hc_batch batch_of(const hc_rows *rows, const hc_part *part) {
    uint64_t step_bytes = 2 * rows->terms * TERM_BYTES, all = part->behind_tiles - part->first_tile;
    uint64_t most = X_BYTES / (step_bytes * rows->steps), enough = rows->terms == 1 ? 8 : 4;
    if (all <= most || most >= enough || all == 1)
        return (hc_batch){all <= most || all == 1 ? all : most, rows->steps, UINT64_MAX};
    uint64_t high = all < enough ? all : enough, steps = X_BYTES / (step_bytes * high);
    return (hc_batch){high, steps, HC_KEPT_SUMS / high};
}

/* Rows and panels of a batch, block by block of inputs. */
static void multiply_batch(const hc_rows *rows, const hc_part *part, const hc_batch *batch, float *kept, hc_amx *amx) {
    const hc_weight *weight = rows->op->weight;
    uint64_t high = part->behind_tiles - part->first_tile;
    hc_stream stream = hc_stream_of(hc_panel(weight, hc_panels(weight)), STEP_BYTES, high, hc_panel_bytes(weight));
    _Alignas(64) float sums[HC_HIGH_ROWS * HC_PANEL];
    hc_piece piece = {.of_tile = rows->of_tile, .sums = sums};
    for (uint64_t step = 0; step < rows->steps; step += batch->steps) {
        piece.steps = rows->steps - step < batch->steps ? rows->steps - step : batch->steps;
        piece.is_first = !step;
        piece.is_last = step + piece.steps == rows->steps;
        for (uint64_t panel = part->first_panel; panel < part->behind_panels; panel++)
            for (uint64_t i = 0; i < high; i++) {
                uint64_t first = part->first_tile + i;
                piece.w = (const char *)hc_panel(weight, panel) + step * STEP_BYTES;
                piece.x = rows->x + 2 * first * rows->of_tile + step * rows->terms * TERM_BYTES;
                piece.ahead = hc_ahead_of(&stream, piece.w, i);
                piece.corner = hc_corner_of(rows->op, NULL, first * HC_HIGH_ROWS, panel * HC_PANEL);
                if (batch->steps < rows->steps)
                    piece.sums = kept + ((panel - part->first_panel) * high + i) * HC_HIGH_ROWS * HC_PANEL;
                multiply_piece(rows->count - first * HC_HIGH_ROWS > HC_TILE_ROWS ? 2 : 1, rows->terms, &piece, amx);
            }
    }
}

static void multiply_part(const hc_rows *rows, const hc_part *part, float *kept, hc_amx *amx) {
    hc_batch batch = batch_of(rows, part);
    hc_part some;
    for (some.first_tile = part->first_tile; some.first_tile < part->behind_tiles; some.first_tile = some.behind_tiles) {
        uint64_t left = part->behind_tiles - some.first_tile;
        some.behind_tiles = some.first_tile + (left < batch.high ? left : batch.high);
        for (some.first_panel = part->first_panel; some.first_panel < part->behind_panels;
             some.first_panel = some.behind_panels) {
            left = part->behind_panels - some.first_panel;
            some.behind_panels = some.first_panel + (left < batch.panels ? left : batch.panels);
            multiply_batch(rows, &some, &batch, kept, amx);
        }
    }
}

void HC_NAME(linear_tiles)(const hc_op *any, hc_crew *crew, uint64_t member) {
    const hc_linear_op *op = (const hc_linear_op *)any;
    hc_rows rows = rows_of(op);
    uint64_t num_high = (rows.count + HC_HIGH_ROWS - 1) / HC_HIGH_ROWS, begin = 0, end = rows.count;
    hc_part part = hc_part_of(num_high, hc_panels(op->weight), crew->size, member);
    rows.x = op->scratch;
    if (op->op.rows > HC_FEW_ROWS) {
        hc_share_of(rows.count, crew->size, member, &begin, &end);
        put_rows(&rows, begin, end);
        hc_meet(crew);
    } else {
        rows.x += member * hc_tile_rows_bytes(op);
        put_rows(&rows, begin, end);
    }
    if (part.first_tile == part.behind_tiles || part.first_panel == part.behind_panels)
        return;
    uint8_t of_rows = rows.count < HC_TILE_ROWS ? (uint8_t)rows.count : HC_TILE_ROWS;
    hc_amx amx;
    hc_amx_open(&amx, (const uint8_t[8]){of_rows, of_rows, of_rows, of_rows, of_rows, of_rows, HC_TILE_ROWS, HC_TILE_ROWS},
                (const uint8_t[8]){64, 64, 64, 64, 64, 64, 64, 64});
    multiply_part(&rows, &part, (float *)(rows.x + hc_tile_rows_bytes(op) + member * hc_kept_bytes(op)), &amx);
    hc_amx_close(&amx);
}
