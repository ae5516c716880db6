/* Head norms and rotation, and keys and values into the cache. Members share heads: one row has enough for several. */
#include "vectors.h"

/* 1 / rms of a head, in an order that only its size decides. */
static float factor_of(const float *head, uint64_t head_dim, double eps) {
    vf sum = {0};
    for (uint64_t i = 0; i < head_dim; i += HC_W) {
        vf v = v_load_up_to(head + i, head_dim - i);
        sum = v_fma(v, v, sum);
    }
    return (float)(1.0 / sqrt((double)v_sum(sum) / (double)head_dim + eps));
}

/* HC_W elements of each half, or as many as are left: h * weight * factor, then h * cos + swapped h * signed_sin. */
V_INLINE void turn(float *head, const float *cos, const float *signed_sin, const float *weight, float factor,
                   uint64_t half, uint64_t count) {
    vf first = v_load_up_to(head, count), second = v_load_up_to(head + half, count);
    if (weight) {
        first = first * factor * v_load_up_to(weight, count);
        second = second * factor * v_load_up_to(weight + half, count);
    }
    vf of_first = v_fma(second, v_load_up_to(signed_sin, count), first * v_load_up_to(cos, count));
    vf of_second = v_fma(first, v_load_up_to(signed_sin + half, count), second * v_load_up_to(cos + half, count));
    v_store_up_to(head, of_first, count);
    v_store_up_to(head + half, of_second, count);
}

static void rotate_head(const hc_rotate_op *op, float *head, uint64_t index, uint64_t position) {
    uint64_t head_dim = op->head_dim, half = head_dim / 2, i = 0;
    const float *cos = op->cos + position * head_dim, *signed_sin = op->signed_sin + position * head_dim;
    const float *weight = op->norm_weights ? op->norm_weights + index * head_dim : NULL;
    float factor = weight ? factor_of(head, head_dim, op->eps) : 1.0f;
    for (; i + HC_W <= half; i += HC_W)
        turn(head + i, cos + i, signed_sin + i, weight ? weight + i : NULL, factor, half, HC_W);
    if (i < half)
        turn(head + i, cos + i, signed_sin + i, weight ? weight + i : NULL, factor, half, half - i);
}

void HC_NAME(rotate)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_rotate_op *op = (const hc_rotate_op *)header;
    uint64_t rotating = op->heads + op->kv_heads, heads = rotating + op->kv_heads, head_dim = op->head_dim, begin, end;
    hc_share_of(header->rows * heads, crew->size, member, &begin, &end);
    for (uint64_t unit = begin; unit < end; unit++) {
        uint64_t row = unit / heads, index = unit % heads;
        float *head = op->qkv + unit * head_dim;
        if (index < rotating)
            rotate_head(op, head, index, (uint64_t)op->positions[row]);
        if (index < op->heads || !op->keys)
            continue;
        float *written = index < rotating ? op->keys : op->values;
        uint64_t kv_head = (index - op->heads) % op->kv_heads;
        memcpy(written + ((uint64_t)op->slots[row] * op->kv_heads + kv_head) * head_dim, head, head_dim * sizeof *head);
    }
}
