/* Head norms, what norms over all heads need, rotation, and keys and values into the cache. Members share heads: one row has enough for several. */
#include "vectors.h"

extern hc_kernel HC_NAME(rotate);
extern hc_kernel HC_NAME(squares);

/* What a head is rotated by. */
typedef struct {
    const void *cos, *signed_sin; /* of its position */
    const void *weight;           /* of its norm, or NULL */
    uint64_t weight_type;
    float factor; /* 1 / rms */
} hc_turn;

/* Sum of squares of a head, in an order that only its size decides. */
V_INLINE double squares_of(const void *head, uint64_t head_dim, const uint64_t type) {
    vf sum = {0};
    for (uint64_t i = 0; i < head_dim; i += HC_W) {
        vf v = v_load_up_to_as(hc_at(head, i, type), head_dim - i, type);
        sum = v_fma(v, v, sum);
    }
    return (double)v_sum(sum);
}

/* HC_W elements of each half, or as many as are left: h * weight * factor, then h * cos + swapped h * signed_sin. */
V_INLINE void turn(void *head, const hc_turn *by, uint64_t i, uint64_t half, uint64_t count, const uint64_t type) {
    void *low = hc_to(head, i, type), *high = hc_to(low, half, type);
    const void *cos = hc_at(by->cos, i, type), *signed_sin = hc_at(by->signed_sin, i, type);
    vf first = v_load_up_to_as(low, count, type), second = v_load_up_to_as(high, count, type);
    if (by->weight) {
        const void *weight = hc_at(by->weight, i, by->weight_type);
        first = first * by->factor * v_load_up_to_as(weight, count, by->weight_type);
        second = second * by->factor * v_load_up_to_as(hc_at(weight, half, by->weight_type), count, by->weight_type);
    }
    vf of_first = v_fma(second, v_load_up_to_as(signed_sin, count, type), first * v_load_up_to_as(cos, count, type));
    vf of_second = v_fma(first, v_load_up_to_as(hc_at(signed_sin, half, type), count, type),
                         second * v_load_up_to_as(hc_at(cos, half, type), count, type));
    v_store_up_to_as(low, of_first, count, type);
    v_store_up_to_as(high, of_second, count, type);
}

V_INLINE void rotate_head(const hc_rotate_op *op, void *head, uint64_t row, uint64_t index, const uint64_t type) {
    uint64_t head_dim = op->head_dim, half = head_dim / 2, i = 0, position = (uint64_t)op->positions[row];
    hc_turn by = {hc_at(op->cos, position * head_dim, type), hc_at(op->signed_sin, position * head_dim, type), NULL,
                  op->norm_type, 1.0f};
    if (op->norm_weights) {
        by.weight = hc_at(op->norm_weights, index * head_dim, op->norm_type);
        double mean_square = op->mean_squares ? (double)op->mean_squares[2 * row + (index >= op->heads)]
                                              : squares_of(head, head_dim, type) / (double)head_dim;
        by.factor = (float)(1.0 / sqrt(mean_square + op->eps));
    }
    for (; i + HC_W <= half; i += HC_W)
        turn(head, &by, i, half, HC_W, type);
    if (i < half)
        turn(head, &by, i, half, half - i, type);
}

/* Puts a head into the cache. */
V_INLINE void keep_head(void *to, const void *head, uint64_t head_dim, uint64_t cache_type, const uint64_t type) {
    if (cache_type == type) {
        memcpy(to, head, head_dim * hc_width_of(type));
        return;
    }
    for (uint64_t i = 0; i < head_dim; i += HC_W)
        v_store_up_to_as(hc_to(to, i, cache_type), v_load_up_to_as(hc_at(head, i, type), head_dim - i, type),
                         head_dim - i, cache_type);
}

V_INLINE void norm_head(void *head, uint64_t head_dim, double eps, const uint64_t type) {
    float factor = (float)(1.0 / sqrt(squares_of(head, head_dim, type) / (double)head_dim + eps));
    for (uint64_t i = 0; i < head_dim; i += HC_W) {
        void *at = hc_to(head, i, type);
        v_store_up_to_as(at, factor * v_load_up_to_as(at, head_dim - i, type), head_dim - i, type);
    }
}

V_INLINE void rotate_heads(const hc_rotate_op *op, uint64_t begin, uint64_t end, const uint64_t type) {
    uint64_t rotating = op->heads + op->kv_heads, heads = rotating + op->kv_heads, head_dim = op->head_dim;
    for (uint64_t unit = begin; unit < end; unit++) {
        uint64_t row = unit / heads, index = unit % heads;
        void *head = hc_to(op->qkv, unit * head_dim, type);
        if (index < rotating)
            rotate_head(op, head, row, index, type);
        else if (op->norms_values)
            norm_head(head, head_dim, op->eps, type);
        if (index < op->heads || !op->keys)
            continue;
        uint64_t kv_head = (index - op->heads) % op->kv_heads;
        uint64_t at = ((uint64_t)op->slots[row] * op->kv_heads + kv_head) * head_dim;
        keep_head(hc_to(index < rotating ? op->keys : op->values, at, op->cache_type), head, head_dim, op->cache_type, type);
    }
}

void HC_NAME(rotate)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_rotate_op *op = (const hc_rotate_op *)header;
    uint64_t begin, end;
    hc_share_of(header->rows * (op->heads + 2 * op->kv_heads), crew->size, member, &begin, &end);
    V_TYPED(op->type, rotate_heads, op, begin, end);
}

V_INLINE void sum_squares(const hc_squares_op *op, uint64_t begin, uint64_t end, const uint64_t type) {
    uint64_t heads = op->heads + 2 * op->kv_heads;
    for (uint64_t row = begin; row < end; row++) {
        double of_queries = 0.0, of_keys = 0.0;
        for (uint64_t head = 0; head < op->heads + op->kv_heads; head++) {
            const void *at = hc_at(op->qkv, (row * heads + head) * op->head_dim, type);
            *(head < op->heads ? &of_queries : &of_keys) += squares_of(at, op->head_dim, type);
        }
        op->y[2 * row] = (float)(of_queries / op->query_width);
        op->y[2 * row + 1] = (float)(of_keys / op->key_width);
    }
}

void HC_NAME(squares)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_squares_op *op = (const hc_squares_op *)header;
    uint64_t begin, end;
    hc_share_of(header->rows, crew->size, member, &begin, &end);
    V_TYPED(op->type, sum_squares, op, begin, end);
}
