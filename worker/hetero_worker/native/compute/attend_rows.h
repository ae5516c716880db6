/* What kernels have in common that join a chunk of tokens to query rows: what rows see, and how chunks are joined. */
#ifndef HETERO_ATTEND_ROWS_H
#define HETERO_ATTEND_ROWS_H

#include "vectors.h"

#include "attend.h"

#include <float.h>

/* What some rows see of a chunk, as tokens of it: [begin, end) by any of them. */
typedef struct {
    uint64_t begin, end;
} hc_sight;

static inline uint64_t position_of(const hc_attend_rows *rows, uint64_t row) {
    return rows->tokens == 1 ? rows->position : rows->position + row / rows->group;
}

static inline uint64_t row_begin(const hc_attend_rows *rows, uint64_t row, uint64_t first_token) {
    uint64_t seen = hc_first_seen(rows->cache, position_of(rows, row));
    return seen > first_token ? seen - first_token : 0;
}

static inline uint64_t row_end(const hc_attend_rows *rows, uint64_t row, uint64_t first_token) {
    uint64_t past = position_of(rows, row) + 1;
    past = past > first_token ? past - first_token : 0;
    return past < HC_CHUNK ? past : HC_CHUNK;
}

/* Empty, with begin >= end, if none of them sees any. */
static inline hc_sight sight_of(const hc_attend_rows *rows, uint64_t first, uint64_t count, uint64_t first_token) {
    return (hc_sight){row_begin(rows, first, first_token), row_end(rows, first + count - 1, first_token)};
}

/* Where keys and values of the tokens begin, in whole steps of tiles. Tokens that nobody sees are not read: another's are, in
 * their place. */
static inline void find_rows(const hc_attend_rows *rows, uint64_t first_token, hc_sight sight, const hc_attend_work *work) {
    const hc_cache *cache = rows->cache;
    uint64_t begin = first_token + sight.begin, end = first_token + sight.end;
    HC_BASE_NAME(attend_find)(cache, rows->table, rows->kv_head, begin, end, work->key_rows);
    uint64_t first = sight.begin / HC_PAIRED_INPUTS * HC_PAIRED_INPUTS, past = hc_round_up(sight.end, HC_PAIRED_INPUTS);
    for (uint64_t i = first; i < sight.begin; i++)
        work->key_rows[i] = work->key_rows[sight.begin];
    for (uint64_t i = sight.end; i < past; i++)
        work->key_rows[i] = work->key_rows[sight.end - 1];
    for (uint64_t i = first; i < past; i++)
        work->value_rows[i] =
            (const char *)cache->values + ((const char *)work->key_rows[i] - (const char *)cache->keys);
}

V_INLINE vf capped(vf score, float soft_cap) { return v_tanh(score / soft_cap) * soft_cap; }

/* Scores of tokens from `first` on; those beside [begin, end) become -infinity. */
V_INLINE vf seen_of(vf scores, uint64_t first, uint64_t begin, uint64_t end) {
    if (first >= begin && first + HC_W <= end)
        return scores;
    vi token = V_COUNTING + v_all_of((int32_t)first);
    return v_choose((token >= v_all_of((int32_t)begin)) & (token < v_all_of((int32_t)end)), scores, v_all(-INFINITY));
}

/* Joins maxima and sums of a chunk to those of the rows, and says what totals are to be multiplied by. */
static inline void join_sums(const hc_state *state, const float *chunk_maximum, const float *chunk_sum, uint64_t rows,
                      const hc_attend_work *work) {
    for (uint64_t row = 0; row < rows; row += HC_W) {
        vf before = v_load(state->maximum + row), of_chunk = v_load(chunk_maximum + row);
        vf maximum = v_max(before, of_chunk);
        vf by = v_exp(before - maximum), chunk_by = v_exp(of_chunk - maximum);
        v_store(state->maximum + row, maximum);
        v_store(state->sum + row, v_fma(v_load(chunk_sum + row), chunk_by, v_load(state->sum + row) * by));
        v_store(work->of_total + row, by);
        v_store(work->of_chunk + row, chunk_by);
    }
}

static inline void reset_state(const hc_state *state, uint64_t rows, uint64_t padded) {
    for (uint64_t row = 0; row < hc_padded(rows); row++) {
        state->maximum[row] = -FLT_MAX;
        state->sum[row] = 0.0f;
    }
    memset(state->total, 0, rows * padded * sizeof(float));
}

#endif
