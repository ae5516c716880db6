/* Attention over a paged cache, in chunks: what its two kernels, and those who make room for them, share.
 *
 * Query rows of one KV head attend to a chunk of tokens after the other. Chunks begin at multiples of HC_CHUNK tokens
 * of the sequence. Each gives a largest score, a sum of weights and a weighted sum of values, and these are joined in
 * the order of chunks. So a row's bits depend on its sequence and its position alone: not on the rows computed with
 * it, on who computes which chunk, nor on whether it decodes or is one of a prompt's. */
#ifndef HETERO_ATTEND_H
#define HETERO_ATTEND_H

#include "kernel.h"
#include "packing.h"

#define HC_CHUNK 128
#define HC_WEIGHT_TERMS 2 /* of a weight, where tiles multiply */
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
    float *keys;              /* transposed, or as panels that tiles read */
    float *values;            /* copied, where that is of use, or as panels */
    float *scores;            /* [rows, HC_CHUNK], later the weights */
    char *weights;            /* as tiles read them */
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
    float *query;      /* [tokens * group, padded head_dim], scaled; or as tiles read them */
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

/* Steps of a row that tiles multiply. */
static inline uint64_t hc_tile_steps(uint64_t inputs) { return (inputs + HC_PAIRED_INPUTS - 1) / HC_PAIRED_INPUTS; }

/* What rows of so many numbers take, in so many terms for tiles. */
static inline uint64_t hc_term_floats(uint64_t rows, uint64_t inputs, uint64_t terms) {
    return hc_round_up(rows, HC_TILE_ROWS) * hc_tile_steps(inputs) * HC_PAIRED_INPUTS * terms / 2;
}

static inline uint64_t hc_query_floats(const hc_cache *cache, uint64_t rows) {
    uint64_t as_floats = rows * hc_padded(cache->head_dim);
    uint64_t as_terms = hc_term_floats(rows, cache->head_dim, 1);
    return as_floats > as_terms ? as_floats : as_terms;
}

static inline uint64_t hc_state_floats(uint64_t rows, uint64_t head_dim) {
    return 2 * hc_padded(rows) + rows * hc_padded(head_dim);
}

static inline hc_state hc_state_at(float *at, uint64_t rows) {
    return (hc_state){at, at + hc_padded(rows), at + 2 * hc_padded(rows)};
}

/* Floats of a chunk's keys, or values. */
static inline uint64_t hc_chunk_floats(const hc_cache *cache) { return HC_CHUNK * hc_padded(cache->head_dim); }

static inline uint64_t hc_work_floats(const hc_cache *cache, uint64_t rows) {
    uint64_t pointers = 3 * HC_CHUNK * sizeof(void *) / sizeof(float);
    uint64_t scores = HC_CHUNK * hc_round_up(rows, HC_TILE_ROWS);
    return pointers + 2 * hc_chunk_floats(cache) + scores + hc_term_floats(rows, HC_CHUNK, HC_WEIGHT_TERMS) +
           4 * hc_padded(rows);
}

static inline hc_attend_work hc_work_at(float *at, const hc_cache *cache, uint64_t rows) {
    hc_attend_work work;
    work.key_rows = (const void **)(void *)at;
    work.value_rows = work.key_rows + HC_CHUNK;
    work.next_rows = work.value_rows + HC_CHUNK;
    work.next = work.next_rows;
    work.num_next = 0;
    work.keys = (float *)(void *)(work.next_rows + HC_CHUNK);
    work.values = work.keys + hc_chunk_floats(cache);
    work.scores = work.values + hc_chunk_floats(cache);
    float *weights = work.scores + HC_CHUNK * hc_round_up(rows, HC_TILE_ROWS);
    work.weights = (char *)weights;
    work.chunk_maximum = weights + hc_term_floats(rows, HC_CHUNK, HC_WEIGHT_TERMS);
    work.chunk_sum = work.chunk_maximum + hc_padded(rows);
    work.of_total = work.chunk_sum + hc_padded(rows);
    work.of_chunk = work.of_total + hc_padded(rows);
    return work;
}

/* Of a member of the team that decodes: its work, a row's queries, and a state for each KV head. */
static inline uint64_t hc_decode_member_floats(const hc_cache *cache) {
    uint64_t group = hc_group(cache);
    uint64_t of_head = hc_query_floats(cache, group) + hc_state_floats(group, cache->head_dim);
    return hc_work_floats(cache, group) + cache->kv_heads * of_head;
}

/* A state for each KV head and chunk of a row that several members share. */
static inline uint64_t hc_shared_row_floats(const hc_attend_op *op) {
    return hc_most_chunks(&op->cache, op->longest) * op->cache.kv_heads *
           hc_state_floats(hc_group(&op->cache), op->cache.head_dim);
}

static inline uint64_t hc_span_member_floats(const hc_attend_span_op *op, uint64_t team_size) {
    uint64_t rows = hc_span_tokens(op, team_size) * hc_group(&op->cache);
    return hc_work_floats(&op->cache, rows) + hc_query_floats(&op->cache, rows) +
           hc_state_floats(rows, op->cache.head_dim);
}

#ifdef HC_NAME
/* Of sets with tiles, attend_tiles.c has the first and the second; all else is the base's. */
/* Takes the rows' queries, [tokens, heads, head_dim] with `stride` elements from token to token; and resets the rows' state. */
void HC_NAME(attend_begin)(const hc_attend_rows *rows, const void *query, uint64_t stride);
void HC_BASE_NAME(attend_begin)(const hc_attend_rows *rows, const void *query, uint64_t stride);
/* Joins the chunk of that number, of which at least one row sees something, to the rows' state. */
void HC_NAME(attend_chunk)(const hc_attend_rows *rows, uint64_t chunk, const hc_attend_work *work);
void HC_BASE_NAME(attend_chunk)(const hc_attend_rows *rows, uint64_t chunk, const hc_attend_work *work);
/* Where the keys of tokens [begin, end) lie, which must be of one chunk: to rows[token % HC_CHUNK]. */
void HC_BASE_NAME(attend_find)(const hc_cache *cache, const int32_t *table, uint64_t kv_head, uint64_t begin,
                               uint64_t end, const void **rows);
/* Joins the state of `rows` rows of later chunks to that of earlier ones. */
void HC_BASE_NAME(attend_join)(const hc_state *state, const hc_state *later, uint64_t rows, uint64_t head_dim,
                               const hc_attend_work *work);
/* total / sum to [tokens, heads * head_dim]. */
void HC_BASE_NAME(attend_end)(const hc_attend_rows *rows, void *out);
#endif

#endif
