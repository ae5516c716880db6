/* Query rows of a KV head and a chunk of its tokens: scores, weights, and the weighted sum of values.
 *
 * A chunk's keys are transposed once for all rows. Values are taken from where they lie in the cache, unless many rows
 * will read them. Tokens that a row does not see weigh exactly 0, which changes no bit of a sum. */
#include "attend_blocks.h"

#include "attend_rows.h"

#define ROWS_TO_COPY_FOR 16 /* so many rows' reading is faster of copied values by more than copying takes */

void HC_NAME(attend_find)(const hc_cache *cache, const int32_t *table, uint64_t kv_head, uint64_t begin, uint64_t end,
                          const void **rows) {
    uint64_t width = hc_width_of(cache->type), head_bytes = cache->head_dim * width;
    uint64_t stride = cache->kv_heads * head_bytes, block = begin / cache->block_size;
    for (uint64_t offset = begin % cache->block_size; begin < end; block++, offset = 0) {
        uint64_t slot = (uint64_t)table[block] * cache->block_size + offset;
        const char *row = (const char *)cache->keys + slot * stride + kv_head * head_bytes;
        for (; offset < cache->block_size && begin < end; offset++, begin++, row += stride)
            rows[begin % HC_CHUNK] = row;
    }
}

/* [tokens, head_dim] → [slab, head_dim, SLAB]; values will be read soon, and are asked for. */
V_INLINE void transpose_keys(uint64_t head_dim, hc_sight sight, const hc_attend_work *work, const uint64_t type) {
    for (uint64_t token = sight.begin / HC_W * HC_W; token < sight.end; token += HC_W) {
        const void *const *keys = work->key_rows + token, *const *values = work->value_rows + token;
        float *column = work->keys + token / SLAB * SLAB * head_dim + token % SLAB;
        uint64_t d = 0;
        for (; d + HC_W <= head_dim; d += HC_W)
            transpose_block(keys, values, d, column + d * SLAB, HC_W, type);
        if (d < head_dim)
            transpose_block(keys, values, d, column + d * SLAB, head_dim - d, type);
    }
}

/* Copies values to float32 [token, padded head_dim], with zeros behind; the rows' addresses become those of the copies. */
V_INLINE void copy_values(uint64_t head_dim, hc_sight sight, const hc_attend_work *work, const uint64_t type) {
    uint64_t padded = hc_padded(head_dim);
    for (uint64_t token = sight.begin; token < sight.end; token++) {
        float *copy = work->values + token * padded;
        for (uint64_t d = 0; d < padded; d += HC_W)
            v_store(copy + d, d < head_dim ? v_load_up_to_as(hc_at(work->value_rows[token], d, type), head_dim - d, type)
                                           : (vf){0});
        work->value_rows[token] = copy;
    }
}

/* Scores of up to ROWS rows: of all vectors of tokens that one of them sees something of. */
static void score(const hc_attend_rows *rows, uint64_t first, uint64_t count, hc_sight sight, uint64_t slab,
                  const hc_attend_work *work) {
    uint64_t head_dim = rows->cache->head_dim, padded = hc_padded(head_dim), token = slab * SLAB;
    if (sight.begin >= sight.end || token >= sight.end || token + SLAB <= sight.begin)
        return;
    uint64_t vectors = (sight.end - token + HC_W - 1) / HC_W;
    vectors = vectors < VECTORS ? vectors : VECTORS;
    const float *query = rows->query + first * padded, *keys = work->keys + token * head_dim;
    float *scores = work->scores + first * HC_CHUNK + token;
    OF_BLOCK(score_block, count, vectors, query, padded, keys, head_dim, scores)
}

/* A row's scores become weights; tokens [begin, end) are seen, those of `sight` beside get 0. */
static void weigh(float *scores, hc_sight sight, uint64_t begin, uint64_t end, float soft_cap, float *maximum,
                  float *sum) {
    uint64_t first = sight.begin / HC_W * HC_W;
    vf largest = v_all(-FLT_MAX), weights = {0};
    for (uint64_t i = first; i < sight.end; i += HC_W) {
        vf score = v_load(scores + i);
        if (soft_cap != 0.0f)
            score = capped(score, soft_cap);
        score = seen_of(score, i, begin, end);
        v_store(scores + i, score);
        largest = v_max(largest, score);
    }
    *maximum = v_largest(largest);
    vf subtracted = v_all(*maximum);
    for (uint64_t i = first; i < sight.end; i += HC_W) {
        vf weight = v_exp(v_load(scores + i) - subtracted);
        v_store(scores + i, weight);
        weights += weight;
    }
    *sum = v_sum(weights);
}

/* Joins the chunk's values, by their weights, to totals of up to ROWS rows, SLAB dimensions from d on. `type`: of the
 * values, which may be copies; `cached`: of those in the cache. */
V_INLINE void sum_values(const hc_attend_rows *rows, uint64_t first, uint64_t count, hc_sight sight, uint64_t d,
                         const hc_attend_work *work, const uint64_t type, const uint64_t cached) {
    uint64_t head_dim = rows->cache->head_dim, padded = hc_padded(head_dim);
    uint64_t vectors = (head_dim - d + HC_W - 1) / HC_W;
    if (sight.begin >= sight.end)
        return;
    vectors = vectors < VECTORS ? vectors : VECTORS;
    const float *weights = work->scores + first * HC_CHUNK, *of_total = work->of_total + first;
    float *total = rows->state.total + first * padded;
    uint64_t num_next = first ? 0 : work->num_next; /* once for all rows is enough */
    OF_BLOCK(sum_block, count, vectors, weights, work->value_rows, type, d, sight.begin, sight.end, work->next,
             num_next, cached, total, padded, of_total, work->of_chunk + first)
}

static void sum_floats(const hc_attend_rows *rows, uint64_t first, uint64_t count, hc_sight sight, uint64_t d,
                       const hc_attend_work *work) {
    sum_values(rows, first, count, sight, d, work, HC_F32, HC_F32);
}

static void sum_f16(const hc_attend_rows *rows, uint64_t first, uint64_t count, hc_sight sight, uint64_t d,
                    const hc_attend_work *work) {
    sum_values(rows, first, count, sight, d, work, HC_F16, HC_F16);
}

static void sum_bf16(const hc_attend_rows *rows, uint64_t first, uint64_t count, hc_sight sight, uint64_t d,
                     const hc_attend_work *work) {
    sum_values(rows, first, count, sight, d, work, HC_BF16, HC_BF16);
}

/* Copies of values that are cached in 16 bits, of either type. */
static void sum_copies(const hc_attend_rows *rows, uint64_t first, uint64_t count, hc_sight sight, uint64_t d,
                       const hc_attend_work *work) {
    sum_values(rows, first, count, sight, d, work, HC_F32, HC_F16);
}

static uint64_t rows_from(uint64_t first, uint64_t num_rows) {
    return num_rows - first < ROWS ? num_rows - first : ROWS;
}

void HC_NAME(attend_chunk)(const hc_attend_rows *rows, uint64_t chunk, const hc_attend_work *work) {
    const hc_cache *cache = rows->cache;
    uint64_t num_rows = rows->tokens * rows->group, first_token = chunk * HC_CHUNK, head_dim = cache->head_dim;
    hc_sight whole = sight_of(rows, 0, num_rows, first_token);
    find_rows(rows, first_token, whole, work);
    V_CACHED(cache->type, transpose_keys, head_dim, whole, work);
    for (uint64_t slab = 0; slab < HC_CHUNK / SLAB; slab++)
        for (uint64_t row = 0; row < num_rows; row += ROWS) {
            uint64_t count = rows_from(row, num_rows);
            score(rows, row, count, sight_of(rows, row, count, first_token), slab, work);
        }
    for (uint64_t row = 0; row < num_rows; row += ROWS) {
        uint64_t count = rows_from(row, num_rows);
        hc_sight sight = sight_of(rows, row, count, first_token);
        for (uint64_t r = row; r < row + count; r++)
            weigh(work->scores + r * HC_CHUNK, sight, row_begin(rows, r, first_token), row_end(rows, r, first_token),
                  (float)cache->soft_cap, work->chunk_maximum + r, work->chunk_sum + r);
    }
    join_sums(&rows->state, work->chunk_maximum, work->chunk_sum, num_rows, work);
    int copies = num_rows >= ROWS_TO_COPY_FOR || head_dim % HC_W;
    if (copies)
        V_CACHED(cache->type, copy_values, head_dim, whole, work);
    for (uint64_t d = 0; d < head_dim; d += SLAB)
        for (uint64_t row = 0; row < num_rows; row += ROWS) {
            uint64_t count = rows_from(row, num_rows);
            hc_sight sight = sight_of(rows, row, count, first_token);
            if (cache->type == HC_F32)
                sum_floats(rows, row, count, sight, d, work);
            else if (copies)
                sum_copies(rows, row, count, sight, d, work);
            else if (cache->type == HC_F16)
                sum_f16(rows, row, count, sight, d, work);
            else
                sum_bf16(rows, row, count, sight, d, work);
        }
}

V_INLINE void copy_queries(const hc_attend_rows *rows, const void *query, uint64_t stride, const uint64_t type) {
    const hc_cache *cache = rows->cache;
    uint64_t group = rows->group, head_dim = cache->head_dim, padded = hc_padded(head_dim);
    vf scale = v_all((float)cache->scale);
    for (uint64_t row = 0; row < rows->tokens * group; row++) {
        uint64_t from = row / group * stride + (rows->kv_head * group + row % group) * head_dim;
        for (uint64_t d = 0; d < head_dim; d += HC_W)
            v_store_up_to(rows->query + row * padded + d,
                          v_load_up_to_as(hc_at(query, from + d, type), head_dim - d, type) * scale, head_dim - d);
    }
}

void HC_NAME(attend_begin)(const hc_attend_rows *rows, const void *query, uint64_t stride) {
    uint64_t num_rows = rows->tokens * rows->group, padded = hc_padded(rows->cache->head_dim);
    V_TYPED(rows->cache->rows_type, copy_queries, rows, query, stride);
    reset_state(&rows->state, num_rows, padded);
}

void HC_NAME(attend_join)(const hc_state *state, const hc_state *later, uint64_t rows, uint64_t head_dim,
                          const hc_attend_work *work) {
    uint64_t padded = hc_padded(head_dim);
    join_sums(state, later->maximum, later->sum, rows, work);
    for (uint64_t row = 0; row < rows; row++)
        for (uint64_t d = 0; d < padded; d += HC_W) {
            float *at = state->total + row * padded + d;
            vf joined = v_load(later->total + row * padded + d);
            v_store(at, v_fma(joined, v_all(work->of_chunk[row]), v_load(at) * work->of_total[row]));
        }
}

V_INLINE void write_results(const hc_attend_rows *rows, void *out, const uint64_t type) {
    const hc_cache *cache = rows->cache;
    uint64_t group = rows->group, head_dim = cache->head_dim, padded = hc_padded(head_dim);
    for (uint64_t row = 0; row < rows->tokens * group; row++) {
        uint64_t head = rows->kv_head * group + row % group;
        uint64_t to = (row / group * cache->heads + head) * head_dim;
        float sum = rows->state.sum[row];
        if (cache->sinks)
            sum += v_exp(v_all(cache->sinks[head] - rows->state.maximum[row]))[0];
        vf by = v_all(1.0f / sum);
        for (uint64_t d = 0; d < head_dim; d += HC_W)
            v_store_up_to_as(hc_to(out, to + d, type), v_load(rows->state.total + row * padded + d) * by, head_dim - d,
                             type);
    }
}

void HC_NAME(attend_end)(const hc_attend_rows *rows, void *out) {
    V_TYPED(rows->cache->rows_type, write_results, rows, out);
}
