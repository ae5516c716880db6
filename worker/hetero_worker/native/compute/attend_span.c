/* Attention of a prompt's tokens. Members share (KV head, block of tokens) pairs by the scores that they have to
 * compute; a block goes chunk by chunk through what it sees. */
#include "isa.h"

#include "attend.h"

/* What a token of [begin, end) costs, about: the tokens that the last of them sees of what the first one does. */
static uint64_t tokens_seen(const hc_cache *cache, uint64_t begin, uint64_t end) {
    return end - hc_first_seen(cache, begin);
}

static void attend_block(const hc_attend_span_op *op, uint64_t kv_head, uint64_t begin, uint64_t end, float *scratch,
                         uint64_t most_rows) {
    const hc_cache *cache = &op->cache;
    uint64_t head_dim = cache->head_dim, position = op->num_computed + begin, past = op->num_computed + end;
    hc_attend_work work = hc_work_at(scratch, cache, most_rows);
    float *query = scratch + hc_work_floats(cache, most_rows);
    hc_state state = hc_state_at(query + hc_query_floats(cache, most_rows), most_rows);
    hc_attend_rows rows = {cache, op->table, kv_head, hc_group(cache), end - begin, position, query, state};
    HC_NAME(attend_begin)(&rows, hc_at(op->query, begin * op->query_stride, cache->rows_type), op->query_stride);
    for (uint64_t chunk = hc_first_seen(cache, position) / HC_CHUNK; chunk * HC_CHUNK < past; chunk++)
        HC_NAME(attend_chunk)(&rows, chunk, &work);
    HC_BASE_NAME(attend_end)(&rows, hc_to(op->out, begin * cache->heads * head_dim, cache->rows_type));
}

void HC_NAME(attend_span)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_attend_span_op *op = (const hc_attend_span_op *)header;
    const hc_cache *cache = &op->cache;
    uint64_t tokens = hc_span_tokens(op, crew->size), whole = 0, cost = 0;
    float *scratch = (float *)op->scratch + member * hc_span_member_floats(op, crew->size);
    for (uint64_t begin = 0; begin < header->rows; begin += tokens) {
        uint64_t end = begin + tokens < header->rows ? begin + tokens : header->rows;
        whole += tokens_seen(cache, op->num_computed + begin, op->num_computed + end) * (end - begin) * cache->kv_heads;
    }
    for (uint64_t kv_head = 0; kv_head < cache->kv_heads; kv_head++)
        for (uint64_t begin = 0; begin < header->rows; begin += tokens) {
            uint64_t end = begin + tokens < header->rows ? begin + tokens : header->rows;
            if (((cost + 1) * crew->size - 1) / whole == member)
                attend_block(op, kv_head, begin, end, scratch, tokens * hc_group(cache));
            cost += tokens_seen(cache, op->num_computed + begin, op->num_computed + end) * (end - begin);
        }
}
