/* Query rows of a KV head and a chunk of its tokens by tiles (tile_products.h), where queries and cache are bfloat16. All
 * others are the base's: with float32 queries, of three terms, prompts gain less than decoding loses.
 *
 * Keys become panels of 32 tokens, with pairs of dimensions; values become panels of 32 dimensions, with pairs of tokens.
 * Scores are scaled where weights are made of them. Weights are rounded to 16 bits, and two terms. */
#include "attend_rows.h"
#include "tile_products.h"

#define STEPS (HC_CHUNK / HC_PAIRED_INPUTS)          /* of a chunk's tokens */
#define STEP_BYTES (HC_WEIGHT_TERMS * HC_TERM_BYTES) /* of a tile's weights */

static int takes_tiles(const hc_cache *cache) { return cache->type == HC_BF16 && cache->rows_type == HC_BF16; }

/* 32 numbers of 16 bits, zeros behind the first `count`. */
V_INLINE u32x16 load_pairs(const void *from, uint64_t count) {
    u32x16 pairs = {0};
    if (count >= HC_PAIRED_INPUTS)
        memcpy(&pairs, from, sizeof pairs);
    else
#if defined(__AVX512BW__)
        pairs = (u32x16)_mm512_maskz_loadu_epi16((__mmask32)((1u << count) - 1), from);
#else
        memcpy(&pairs, from, count * sizeof(uint16_t));
#endif
    return pairs;
}

V_INLINE void store_pairs(void *to, u32x16 pairs) { memcpy(to, &pairs, sizeof pairs); }

/* 16 vectors as the columns of what they were the rows of. */
V_INLINE void transpose(u32x16 rows[HC_LANES]) {
#if HC_W == HC_LANES
    v_transpose((vf *)rows);
#else
    uint32_t from[HC_LANES][HC_LANES], to[HC_LANES][HC_LANES];
    memcpy(from, rows, sizeof from);
    for (int i = 0; i < HC_LANES; i++)
        for (int j = 0; j < HC_LANES; j++)
            to[j][i] = from[i][j];
    memcpy(rows, to, sizeof to);
#endif
}

/* Keys to [panel of tokens][step of dimensions][pair][token], and asks for the values. */
static void pack_keys(uint64_t head_dim, hc_sight sight, const hc_attend_work *work) {
    uint64_t steps = hc_tile_steps(head_dim), first = sight.begin / HC_PAIRED_INPUTS * HC_PAIRED_INPUTS;
    uint64_t past = hc_round_up(sight.end, HC_PAIRED_INPUTS);
    for (uint64_t token = first; token < past; token += HC_LANES) {
        char *to = (char *)work->keys + token / HC_PANEL * steps * HC_STEP_BYTES + token % HC_PANEL * sizeof(uint32_t);
        for (uint64_t d = 0; d < head_dim; d += HC_PAIRED_INPUTS, to += HC_STEP_BYTES) {
            u32x16 block[HC_LANES];
            HC_UNROLLED
            for (uint64_t i = 0; i < HC_LANES; i++) {
                block[i] = load_pairs(hc_at(work->key_rows[token + i], d, HC_BF16), head_dim - d);
                __builtin_prefetch(hc_at(work->value_rows[token + i], d, HC_BF16));
            }
            transpose(block);
            HC_UNROLLED
            for (uint64_t i = 0; i < HC_LANES; i++)
                store_pairs(to + i * HC_PAIR_BYTES, block[i] << 16 | block[i] >> 16);
        }
    }
}

/* The numbers of two tokens' rows side by side, the first token's above: 32 dimensions. */
V_INLINE void join_pairs(u32x16 first, u32x16 second, char *to) {
#if defined(__AVX512BW__)
    static const uint16_t LOW[2 * HC_LANES] = {32, 0, 33, 1, 34, 2,  35, 3,  36, 4,  37, 5,  38, 6,  39, 7,
                                               40, 8, 41, 9, 42, 10, 43, 11, 44, 12, 45, 13, 46, 14, 47, 15};
    __m512i low = _mm512_loadu_si512(LOW), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16((__m512i)first, low, (__m512i)second));
    _mm512_storeu_si512(to + HC_TILE_BYTES, _mm512_permutex2var_epi16((__m512i)first, high, (__m512i)second));
#else
    uint16_t above[2 * HC_LANES], below[2 * HC_LANES];
    memcpy(above, &first, sizeof above);
    memcpy(below, &second, sizeof below);
    for (int i = 0; i < 2 * HC_LANES; i++) {
        uint32_t pair = (uint32_t)above[i] << 16 | below[i];
        memcpy(to + i * sizeof pair, &pair, sizeof pair);
    }
#endif
}

/* Values to [panel of dimensions][step of tokens][pair][dimension], and asks for what is read next. */
static void pack_values(uint64_t head_dim, hc_sight sight, const hc_attend_work *work) {
    uint64_t first = sight.begin / HC_PAIRED_INPUTS * HC_PAIRED_INPUTS, past = hc_round_up(sight.end, HC_PAIRED_INPUTS);
    for (uint64_t token = first; token < past; token += 2) {
        char *to = (char *)work->values + token / 2 * HC_PAIR_BYTES;
        for (uint64_t d = 0; d < head_dim; d += HC_PAIRED_INPUTS, to += STEPS * HC_STEP_BYTES) {
            for (uint64_t next = token - first; next < token - first + 2 && next < work->num_next; next++)
                __builtin_prefetch(hc_at(work->next[next], d, HC_BF16));
            join_pairs(load_pairs(hc_at(work->value_rows[token], d, HC_BF16), head_dim - d),
                       load_pairs(hc_at(work->value_rows[token + 1], d, HC_BF16), head_dim - d), to);
        }
    }
}

/* Rows of one or two tiles, and what they see of the chunk, in whole steps. */
typedef struct {
    uint64_t first, count;
    uint64_t tiles;
    hc_sight sight;
    uint64_t first_step, behind_steps;
} hc_high;

static hc_high high_of(const hc_attend_rows *rows, uint64_t first, uint64_t first_token) {
    uint64_t left = rows->tokens * rows->group - first, most = 2 * HC_TILE_ROWS;
    hc_high high = {.first = first, .count = left < most ? left : most, .tiles = left > HC_TILE_ROWS ? 2 : 1};
    high.sight = sight_of(rows, first, high.count, first_token);
    high.first_step = high.sight.begin / HC_PAIRED_INPUTS;
    high.behind_steps = hc_tile_steps(high.sight.end);
    return high;
}

static void score(const hc_attend_rows *rows, const hc_high *high, const hc_attend_work *work, hc_amx *amx) {
    uint64_t steps = hc_tile_steps(rows->cache->head_dim), of_tile = steps * HC_TERM_BYTES;
    hc_product product = {.steps = steps, .of_tile = of_tile, .sums_stride = HC_CHUNK * sizeof(float)};
    product.x = (const char *)rows->query + high->first / HC_TILE_ROWS * of_tile;
    for (uint64_t panel = high->first_step; panel < high->behind_steps; panel++) {
        product.w = (const char *)work->keys + panel * steps * HC_STEP_BYTES;
        product.sums = work->scores + high->first * HC_CHUNK + panel * HC_PANEL;
        hc_multiply_tiles(high->tiles, 1, 1, &product, amx);
    }
}

/* Sums of a row as they become weights: 2^(sum * by - largest). */
typedef struct {
    float by, largest;
} hc_exponent;

/* 2 to the x, for x up to 0: within 2^-18 of it. What is less than -126 gives 0, what is no number stays so. */
V_INLINE f32x16 power_of_2(f32x16 x) {
#if defined(__AVX512DQ__)
    f32x16 rest = (f32x16)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
    f32x16 whole, rest;
    for (int i = 0; i < HC_LANES; i++)
        whole[i] = floorf(x[i] < -127.0f ? -127.0f : x[i]);
    rest = x - whole;
#endif
    f32x16 power = hc_fma(hc_all(0.0135341679f), rest, hc_all(0.0520114606f));
    power = hc_fma(power, rest, hc_all(0.241442757f));
    power = hc_fma(power, rest, hc_all(0.693003834f));
    power = hc_fma(power, rest, hc_all(1.00000259f));
#if defined(__AVX512DQ__)
    __mmask16 is_some = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (f32x16)_mm512_maskz_scalef_ps(is_some, (__m512)power, (__m512)x);
#else
    for (int i = 0; i < HC_LANES; i++)
        power[i] = x[i] < -126.0f ? 0.0f : x[i] == x[i] ? ldexpf(power[i], (int)whole[i]) : x[i];
    return power;
#endif
}

/* Sums of tokens that the row does not see become -infinity, capped ones what they are in the end. Returns what weights are
 * made by; `maximum` is the largest score. */
V_INLINE hc_exponent exponent_of(float *sums, const hc_high *high, hc_sight seen, const hc_cache *cache, float *maximum) {
    uint64_t first = high->first_step * HC_PAIRED_INPUTS, past = high->behind_steps * HC_PAIRED_INPUTS;
    float scale = (float)cache->scale, soft_cap = (float)cache->soft_cap;
    vf largest = v_all(-FLT_MAX);
    for (uint64_t i = first; i < past; i += HC_W) {
        vf sum = v_load(sums + i);
        if (soft_cap != 0.0f)
            sum = capped(sum * scale, soft_cap);
        sum = seen_of(sum, i, seen.begin, seen.end);
        if (soft_cap != 0.0f || i < seen.begin || i + HC_W > seen.end) /* else it is what it was */
            v_store(sums + i, sum);
        largest = v_max(largest, sum);
    }
    if (soft_cap != 0.0f)
        scale = 1.0f;
    float top = v_largest(largest), by = scale * 1.44269504f; /* 1 / ln 2 */
    *maximum = top == -FLT_MAX ? top : top * scale;
    return (hc_exponent){by, top == -FLT_MAX ? 0.0f : top * by};
}

/* To 16 bits, of which each of two terms has 8. */
V_INLINE f32x16 rounded(f32x16 weight) { return (f32x16)(((u32x16)weight + 0x80) & 0xffffff00); }

/* Weights of a row, as tiles read them; returns their sum. */
V_INLINE float put_weights(const float *sums, const hc_high *high, hc_exponent exponent, char *to) {
    union {
        f32x16 all;
        vf parts[HC_LANES / HC_W];
    } sum = {.all = hc_all(0.0f)};
    to += high->first_step * STEP_BYTES;
    for (uint64_t step = high->first_step; step < high->behind_steps; step++, to += STEP_BYTES) {
        f32x16 weights[2];
        for (int i = 0; i < 2; i++)
            weights[i] = rounded(power_of_2(hc_fma(hc_load(sums + step * HC_PAIRED_INPUTS + i * HC_LANES),
                                                   hc_all(exponent.by), hc_all(-exponent.largest))));
        sum.all = sum.all + weights[0] + weights[1];
        hc_put_numbers(weights, NULL, HC_WEIGHT_TERMS, to); /* NaN stays in all terms */
    }
    for (int half = HC_LANES / HC_W / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            sum.parts[i] += sum.parts[i + half];
    return v_sum(sum.parts[0]);
}

static void weigh(const hc_attend_rows *rows, const hc_high *high, uint64_t first_token, const hc_attend_work *work) {
    for (uint64_t row = high->first; row < high->first + high->count; row++) {
        hc_sight seen = {row_begin(rows, row, first_token), row_end(rows, row, first_token)};
        float *scores = work->scores + row * HC_CHUNK;
        char *to = work->weights + row / HC_TILE_ROWS * STEPS * STEP_BYTES + row % HC_TILE_ROWS * HC_TILE_BYTES;
        hc_exponent exponent = exponent_of(scores, high, seen, rows->cache, work->chunk_maximum + row);
        work->chunk_sum[row] = put_weights(scores, high, exponent, to);
    }
}

/* Sums of values by weights, joined to the totals. */
static void sum_values(const hc_attend_rows *rows, const hc_high *high, const hc_attend_work *work, hc_amx *amx) {
    uint64_t head_dim = rows->cache->head_dim, padded = hc_padded(head_dim);
    _Alignas(64) float sums[2 * HC_TILE_ROWS * HC_PANEL];
    hc_product product = {.of_tile = STEPS * STEP_BYTES, .sums = sums, .sums_stride = HC_PANEL * sizeof(float)};
    product.steps = high->behind_steps - high->first_step;
    product.x = work->weights + (high->first / HC_TILE_ROWS * STEPS + high->first_step) * STEP_BYTES;
    for (uint64_t d = 0; d < head_dim; d += HC_PANEL) {
        product.w = (const char *)work->values + (d / HC_PANEL * STEPS + high->first_step) * HC_STEP_BYTES;
        hc_multiply_tiles(high->tiles, HC_WEIGHT_TERMS, 1, &product, amx);
        for (uint64_t row = 0; row < high->count; row++) {
            float *total = rows->state.total + (high->first + row) * padded + d;
            vf by = v_all(work->of_total[high->first + row]), chunk_by = v_all(work->of_chunk[high->first + row]);
            for (uint64_t i = 0; i < HC_PANEL && d + i < padded; i += HC_W)
                v_store(total + i, v_fma(v_load(sums + row * HC_PANEL + i), chunk_by, v_load(total + i) * by));
        }
    }
}

void HC_NAME(attend_chunk)(const hc_attend_rows *rows, uint64_t chunk, const hc_attend_work *work) {
    if (!takes_tiles(rows->cache)) {
        HC_BASE_NAME(attend_chunk)(rows, chunk, work);
        return;
    }
    uint64_t num_rows = rows->tokens * rows->group, first_token = chunk * HC_CHUNK, head_dim = rows->cache->head_dim;
    hc_sight whole = sight_of(rows, 0, num_rows, first_token);
    hc_amx amx;
    find_rows(rows, first_token, whole, work);
    pack_keys(head_dim, whole, work);
    hc_open_tiles(&amx, num_rows);
    for (uint64_t row = 0; row < num_rows; row += 2 * HC_TILE_ROWS) {
        hc_high high = high_of(rows, row, first_token);
        if (high.sight.begin < high.sight.end)
            score(rows, &high, work, &amx);
        weigh(rows, &high, first_token, work);
    }
    join_sums(&rows->state, work->chunk_maximum, work->chunk_sum, num_rows, work);
    pack_values(head_dim, whole, work);
    hc_amx_wrote();
    for (uint64_t row = 0; row < num_rows; row += 2 * HC_TILE_ROWS) {
        hc_high high = high_of(rows, row, first_token);
        if (high.sight.begin < high.sight.end)
            sum_values(rows, &high, work, &amx);
    }
    hc_amx_close(&amx);
}

void HC_NAME(attend_begin)(const hc_attend_rows *rows, const void *query, uint64_t stride) {
    const hc_cache *cache = rows->cache;
    if (!takes_tiles(cache)) {
        HC_BASE_NAME(attend_begin)(rows, query, stride);
        return;
    }
    uint64_t num_rows = rows->tokens * rows->group, group = rows->group, steps = hc_tile_steps(cache->head_dim);
    uint64_t of_tile = steps * HC_TERM_BYTES;
    for (uint64_t row = 0; row < hc_tile_rows(num_rows); row++) {
        uint64_t from = row / group * stride + (rows->kv_head * group + row % group) * cache->head_dim;
        char *to = (char *)rows->query + row / HC_TILE_ROWS * of_tile + row % HC_TILE_ROWS * HC_TILE_BYTES;
        hc_put_row(row < num_rows ? hc_at(query, from, HC_BF16) : NULL, cache->head_dim, steps, HC_BF16, to);
    }
    reset_state(&rows->state, num_rows, hc_padded(cache->head_dim));
}
