/* Decode attention. Members share (row, chunk, KV head) triples, in this order, as evenly as the tokens that they read
 * allow: neighbouring heads of a chunk lie side by side in the cache. A row that is one member's goes chunk by chunk.
 * Of one that several share every chunk is computed by itself, and when all have met they are joined in order. */
#include "isa.h"

#include "attend.h"

#define UNIT_COST 16 /* what a triple costs beside its tokens, in tokens */

/* A row's chunks. */
typedef struct {
    uint64_t position; /* of its query */
    uint64_t first_seen;
    uint64_t first_chunk, past_chunk;
} hc_reach;

/* A deal of all triples: each begins at a cost, and is the member's whose share of the whole that is in. */
typedef struct {
    uint64_t whole;
    uint64_t size;
} hc_deal;

static hc_reach reach_of(const hc_attend_op *op, uint64_t row) {
    uint64_t position = (uint64_t)op->lengths[row] - 1, first_seen = hc_first_seen(&op->cache, position);
    return (hc_reach){position, first_seen, first_seen / HC_CHUNK, position / HC_CHUNK + 1};
}

/* Tokens of a chunk that are seen: the first, and the one behind the last. */
static uint64_t first_of(const hc_reach *reach, uint64_t chunk) {
    return chunk == reach->first_chunk ? reach->first_seen : chunk * HC_CHUNK;
}

static uint64_t past_of(const hc_reach *reach, uint64_t chunk) {
    return chunk + 1 == reach->past_chunk ? reach->position + 1 : (chunk + 1) * HC_CHUNK;
}

static uint64_t chunk_cost(const hc_reach *reach, uint64_t chunk) {
    return past_of(reach, chunk) - first_of(reach, chunk) + UNIT_COST;
}

static uint64_t row_cost(const hc_attend_op *op, const hc_reach *reach) {
    uint64_t tokens = reach->position + 1 - reach->first_seen;
    return (tokens + (reach->past_chunk - reach->first_chunk) * UNIT_COST) * op->cache.kv_heads;
}

static uint64_t member_at(const hc_deal *deal, uint64_t cost) { return ((cost + 1) * deal->size - 1) / deal->whole; }

static hc_deal deal_of(const hc_attend_op *op, const hc_crew *crew) {
    hc_deal deal = {0, crew->size};
    for (uint64_t row = 0; row < op->op.rows; row++) {
        hc_reach reach = reach_of(op, row);
        deal.whole += row_cost(op, &reach);
    }
    return deal;
}

/* Whether the row whose triples begin at `cost` is shared by members. */
static int is_shared(const hc_attend_op *op, const hc_deal *deal, const hc_reach *reach, uint64_t cost) {
    uint64_t last = cost + row_cost(op, reach) - chunk_cost(reach, reach->past_chunk - 1);
    return member_at(deal, cost) != member_at(deal, last);
}

static hc_attend_rows rows_of(const hc_attend_op *op, uint64_t row, const hc_reach *reach, uint64_t kv_head,
                              float *queries, hc_state state) {
    float *query = queries + kv_head * hc_query_floats(&op->cache, hc_group(&op->cache));
    const int32_t *table = op->tables + row * op->table_stride;
    return (hc_attend_rows){&op->cache, table, kv_head, hc_group(&op->cache), 1, reach->position, query, state};
}

/* What a member has in scratch, and behind all members' parts the states of shared rows. */
typedef struct {
    hc_attend_work work;
    float *queries;
    float *states;
    float *shared;
    uint64_t state_floats;
} hc_desk;

static hc_desk desk_of(const hc_attend_op *op, const hc_crew *crew, uint64_t member) {
    uint64_t group = hc_group(&op->cache), head_dim = op->cache.head_dim;
    uint64_t own = hc_decode_member_floats(&op->cache);
    float *at = (float *)op->scratch + member * own;
    hc_desk desk = {.work = hc_work_at(at, &op->cache, group), .state_floats = hc_state_floats(group, head_dim)};
    desk.queries = at + hc_work_floats(&op->cache, group);
    desk.states = desk.queries + op->cache.kv_heads * hc_query_floats(&op->cache, group);
    desk.shared = (float *)op->scratch + crew->size * own;
    return desk;
}

static hc_state own_state(const hc_attend_op *op, const hc_desk *desk, uint64_t kv_head) {
    return hc_state_at(desk->states + kv_head * desk->state_floats, hc_group(&op->cache));
}

/* Of a triple of the `shared_index`-th row that is shared. */
static hc_state shared_state(const hc_attend_op *op, const hc_desk *desk, uint64_t shared_index, uint64_t chunk_index,
                             uint64_t kv_head) {
    uint64_t index = chunk_index * op->cache.kv_heads + kv_head;
    float *at = desk->shared + shared_index * hc_shared_row_floats(op) + index * desk->state_floats;
    return hc_state_at(at, hc_group(&op->cache));
}

static const void *query_of(const hc_attend_op *op, uint64_t row) {
    return hc_at(op->query, row * op->query_stride, op->cache.rows_type);
}

static void *out_of(const hc_attend_op *op, uint64_t row) {
    return hc_to(op->out, row * op->cache.heads * op->cache.head_dim, op->cache.rows_type);
}

/* Says what comes behind a triple: the next KV head, the next chunk or the next row. */
static void look_ahead(const hc_attend_op *op, uint64_t row, hc_reach reach, uint64_t chunk, uint64_t kv_head,
                       hc_attend_work *work) {
    work->num_next = 0;
    if (++kv_head == op->cache.kv_heads) {
        kv_head = 0;
        if (++chunk == reach.past_chunk) {
            if (++row == op->op.rows)
                return;
            reach = reach_of(op, row);
            chunk = reach.first_chunk;
        }
    }
    uint64_t begin = first_of(&reach, chunk), end = past_of(&reach, chunk);
    HC_BASE_NAME(attend_find)(&op->cache, op->tables + row * op->table_stride, kv_head, begin, end, work->next_rows);
    work->next = work->next_rows + begin % HC_CHUNK;
    work->num_next = end - begin;
}

static void attend_alone(const hc_attend_op *op, hc_desk *desk, uint64_t row, const hc_reach *reach) {
    uint64_t kv_heads = op->cache.kv_heads;
    for (uint64_t chunk = reach->first_chunk; chunk < reach->past_chunk; chunk++)
        for (uint64_t kv_head = 0; kv_head < kv_heads; kv_head++) {
            hc_attend_rows rows = rows_of(op, row, reach, kv_head, desk->queries, own_state(op, desk, kv_head));
            if (chunk == reach->first_chunk)
                HC_NAME(attend_begin)(&rows, query_of(op, row), op->query_stride);
            look_ahead(op, row, *reach, chunk, kv_head, &desk->work);
            HC_NAME(attend_chunk)(&rows, chunk, &desk->work);
            if (chunk + 1 == reach->past_chunk)
                HC_BASE_NAME(attend_end)(&rows, out_of(op, row));
        }
}

/* The member's triples of a shared row, which begin at `cost`. */
static void attend_share(const hc_attend_op *op, const hc_deal *deal, hc_desk *desk, uint64_t row,
                         const hc_reach *reach, uint64_t cost, uint64_t shared_index, uint64_t member) {
    for (uint64_t chunk = reach->first_chunk; chunk < reach->past_chunk; chunk++)
        for (uint64_t kv_head = 0; kv_head < op->cache.kv_heads; kv_head++) {
            if (member_at(deal, cost) == member) {
                hc_state state = shared_state(op, desk, shared_index, chunk - reach->first_chunk, kv_head);
                hc_attend_rows rows = rows_of(op, row, reach, kv_head, desk->queries, state);
                HC_NAME(attend_begin)(&rows, query_of(op, row), op->query_stride);
                look_ahead(op, row, *reach, chunk, kv_head, &desk->work);
                HC_NAME(attend_chunk)(&rows, chunk, &desk->work);
            }
            cost += chunk_cost(reach, chunk);
        }
}

/* Chunks of a KV head of a shared row, which all were computed. */
static void join(const hc_attend_op *op, const hc_desk *desk, uint64_t row, const hc_reach *reach,
                 uint64_t shared_index, uint64_t kv_head) {
    hc_state state = shared_state(op, desk, shared_index, 0, kv_head);
    for (uint64_t i = 1; i < reach->past_chunk - reach->first_chunk; i++) {
        hc_state later = shared_state(op, desk, shared_index, i, kv_head);
        HC_BASE_NAME(attend_join)(&state, &later, hc_group(&op->cache), op->cache.head_dim, &desk->work);
    }
    hc_attend_rows rows = rows_of(op, row, reach, kv_head, desk->queries, state);
    HC_BASE_NAME(attend_end)(&rows, out_of(op, row));
}

static void join_shared(const hc_attend_op *op, const hc_deal *deal, const hc_desk *desk, uint64_t member) {
    uint64_t cost = 0, num_shared = 0;
    for (uint64_t row = 0; row < op->op.rows; row++) {
        hc_reach reach = reach_of(op, row);
        if (is_shared(op, deal, &reach, cost)) {
            for (uint64_t kv_head = 0; kv_head < op->cache.kv_heads; kv_head++)
                if ((num_shared * op->cache.kv_heads + kv_head) % deal->size == member)
                    join(op, desk, row, &reach, num_shared, kv_head);
            num_shared++;
        }
        cost += row_cost(op, &reach);
    }
}

void HC_NAME(attend)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_attend_op *op = (const hc_attend_op *)header;
    hc_deal deal = deal_of(op, crew);
    hc_desk desk = desk_of(op, crew, member);
    uint64_t cost = 0, num_shared = 0;
    for (uint64_t row = 0; row < header->rows; row++) {
        hc_reach reach = reach_of(op, row);
        int shared = is_shared(op, &deal, &reach, cost);
        if (shared)
            attend_share(op, &deal, &desk, row, &reach, cost, num_shared, member);
        else if (member_at(&deal, cost) == member)
            attend_alone(op, &desk, row, &reach);
        num_shared += (uint64_t)shared;
        cost += row_cost(op, &reach);
    }
    if (num_shared) {
        hc_meet(crew);
        join_shared(op, &deal, &desk, member);
    }
}
