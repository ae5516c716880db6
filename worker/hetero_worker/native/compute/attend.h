/* Attention over a paged cache, in chunks: what its two kernels, and those who make room for them, share.
 *
 * Query rows of one KV head attend to a chunk of tokens after the other. Chunks begin at multiples of HC_CHUNK tokens
 * of the sequence. Each gives a largest score, a sum of weights and a weighted sum of values, and these are joined in
 * the order of chunks. So a row's bits depend on its sequence and its position alone: not on the rows computed with
 * it, on who computes which chunk, nor on whether it decodes or is one of a prompt's. */
#ifndef HETERO_ATTEND_H
#define HETERO_ATTEND_H

#include "kernel.h"

#define HC_CHUNK 128
#define HC_SPAN_ROWS 96 /* query rows of a span that share a chunk's keys, if a group is not larger by itself */

/* What query rows have of the chunks that were joined. Behind the last row of maximum and sum there is room up to a
 * multiple of 16. */
typedef struct {
    float *maximum; /* of the scores */
    float *sum;     /* of the weights, e^(score - maximum) */
    float *total;   /* [rows, padded head_dim]: values by weights */
} hc_state;

/* What a member works in. */
typedef struct {
    const void **key_rows;   /* [HC_CHUNK]: where a chunk's keys and values begin */
    const void **value_rows;
    const void **next_rows;  /* [HC_CHUNK]: room for `next` */
    const void *const *next; /* [num_next]: where keys begin that will be read next */
    uint64_t num_next;
    float *keys;              /* transposed */
    float *values;            /* copied, where that is of use */
    float *scores;            /* [rows, HC_CHUNK], later the weights */
    float *chunk_maximum;     /* of each row */
    float *chunk_sum;
    float *of_total;          /* what the total and the chunk's values are multiplied by as they are joined */
    float *of_chunk;
} hc_attend_work;

/* Query rows of a KV head: one of each of its query heads for each of `tokens` tokens. */
typedef struct {
    const hc_cache *cache;
    const int32_t *table;
    uint64_t kv_head;
    uint64_t group; /* query heads */
    uint64_t tokens;
    uint64_t position; /* of the first token */
    float *query;      /* [tokens * group, padded head_dim], scaled */
    hc_state state;
} hc_attend_rows;

static inline uint64_t hc_padded(uint64_t count) { return (count + 15) / 16 * 16; }

static inline uint64_t hc_group(const hc_cache *cache) { return cache->heads / cache->kv_heads; }

/* The first token that is seen from a position. */
static inline uint64_t hc_first_seen(const hc_cache *cache, uint64_t position) {
    return cache->window && position >= cache->window ? position + 1 - cache->window : 0;
}

/* Chunks that a sequence of so many tokens is read in, at most. */
static inline uint64_t hc_most_chunks(const hc_cache *cache, uint64_t longest) {
    uint64_t all = (longest + HC_CHUNK - 1) / HC_CHUNK;
    uint64_t seen = cache->window ? (cache->window + HC_CHUNK - 2) / HC_CHUNK + 1 : all;
    return seen < all ? seen : all;
}

/* Tokens of a span that are computed together. */
static inline uint64_t hc_span_tokens(const hc_attend_span_op *op, uint64_t team_size) {
    uint64_t most = HC_SPAN_ROWS / hc_group(&op->cache), blocks_wanted = 4 * team_size / op->cache.kv_heads + 1;
    uint64_t fair = (op->op.rows + blocks_wanted - 1) / blocks_wanted;
    uint64_t tokens = fair < most ? fair : most;
    return tokens ? tokens : 1;
}

static inline uint64_t hc_query_floats(uint64_t rows, uint64_t head_dim) { return rows * hc_padded(head_dim); }

static inline uint64_t hc_state_floats(uint64_t rows, uint64_t head_dim) {
    return 2 * hc_padded(rows) + rows * hc_padded(head_dim);
}

static inline hc_state hc_state_at(float *at, uint64_t rows) {
    return (hc_state){at, at + hc_padded(rows), at + 2 * hc_padded(rows)};
}

static inline uint64_t hc_work_floats(uint64_t rows, uint64_t head_dim) {
    uint64_t pointers = 3 * HC_CHUNK * sizeof(void *) / sizeof(float);
    return pointers + HC_CHUNK * (2 * hc_padded(head_dim) + rows) + 4 * hc_padded(rows);
}

static inline hc_attend_work hc_work_at(float *at, uint64_t rows, uint64_t head_dim) {
    hc_attend_work work;
    work.key_rows = (const void **)(void *)at;
    work.value_rows = work.key_rows + HC_CHUNK;
    work.next_rows = work.value_rows + HC_CHUNK;
    work.next = work.next_rows;
    work.num_next = 0;
    work.keys = (float *)(void *)(work.next_rows + HC_CHUNK);
    work.values = work.keys + HC_CHUNK * hc_padded(head_dim);
    work.scores = work.values + HC_CHUNK * hc_padded(head_dim);
    work.chunk_maximum = work.scores + HC_CHUNK * rows;
    work.chunk_sum = work.chunk_maximum + hc_padded(rows);
    work.of_total = work.chunk_sum + hc_padded(rows);
    work.of_chunk = work.of_total + hc_padded(rows);
    return work;
}

/* Of a member of the team that decodes: its work, a row's queries, and a state for each KV head. */
static inline uint64_t hc_decode_member_floats(const hc_cache *cache) {
    uint64_t group = hc_group(cache), head_dim = cache->head_dim;
    return hc_work_floats(group, head_dim) + hc_query_floats(cache->heads, head_dim) +
           cache->kv_heads * hc_state_floats(group, head_dim);
}

/* A state for each KV head and chunk of a row that several members share. */
static inline uint64_t hc_shared_row_floats(const hc_attend_op *op) {
    return hc_most_chunks(&op->cache, op->longest) * op->cache.kv_heads *
           hc_state_floats(hc_group(&op->cache), op->cache.head_dim);
}

static inline uint64_t hc_span_member_floats(const hc_attend_span_op *op, uint64_t team_size) {
    uint64_t rows = hc_span_tokens(op, team_size) * hc_group(&op->cache), head_dim = op->cache.head_dim;
    return hc_work_floats(rows, head_dim) + hc_query_floats(rows, head_dim) + hc_state_floats(rows, head_dim);
}

#ifdef HC_NAME
/* Copies the rows' queries, [tokens, heads, head_dim] with `stride` elements from token to token, scaled; and resets the
 * rows' state. */
void HC_NAME(attend_begin)(const hc_attend_rows *rows, const void *query, uint64_t stride);
/* Where the keys of tokens [begin, end) lie, which must be of one chunk: to rows[token % HC_CHUNK]. */
void HC_NAME(attend_find)(const hc_cache *cache, const int32_t *table, uint64_t kv_head, uint64_t begin, uint64_t end,
                          const void **rows);
/* Joins the chunk of that number, of which at least one row sees something, to the rows' state. */
void HC_NAME(attend_chunk)(const hc_attend_rows *rows, uint64_t chunk, const hc_attend_work *work);
/* Joins the state of `rows` rows of later chunks to that of earlier ones. */
void HC_NAME(attend_join)(const hc_state *state, const hc_state *later, uint64_t rows, uint64_t head_dim,
                          const hc_attend_work *work);
/* total / sum to [tokens, heads * head_dim]. */
void HC_NAME(attend_end)(const hc_attend_rows *rows, void *out);
#endif

#endif
