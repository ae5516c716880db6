/* Multi-head latent attention: a token's compressed keys into the cache, and products of each head by itself. */
#include "isa.h"

#include "linear.h"
#include "vectors.h"

extern hc_kernel HC_NAME(latent), HC_NAME(heads), HC_NAME(linear);

/* h * cos + swapped h * signed_sin of the elements [0, dim) of `from`, to `to`, which is of another type. */
V_INLINE void rotate_to(void *to, uint64_t to_type, const void *from, const void *cos, const void *signed_sin,
                        uint64_t dim, const uint64_t type) {
    uint64_t half = dim / 2;
    for (uint64_t i = 0; i < half; i += HC_W) {
        uint64_t left = half - i < HC_W ? half - i : HC_W;
        vf first = v_load_up_to_as(hc_at(from, i, type), left, type);
        vf second = v_load_up_to_as(hc_at(from, half + i, type), left, type);
        vf low = first * v_load_up_to_as(hc_at(cos, i, type), left, type);
        vf high = second * v_load_up_to_as(hc_at(cos, half + i, type), left, type);
        low = v_fma(second, v_load_up_to_as(hc_at(signed_sin, i, type), left, type), low);
        high = v_fma(first, v_load_up_to_as(hc_at(signed_sin, half + i, type), left, type), high);
        v_store_up_to_as(hc_to(to, i, to_type), low, left, to_type);
        v_store_up_to_as(hc_to(to, half + i, to_type), high, left, to_type);
    }
}

/* x / rms(x) * weight to the cache, in an order that only the width decides. */
V_INLINE void norm_to(void *to, const void *from, const hc_latent_op *op, const uint64_t type) {
    uint64_t rank = op->rank, to_type = op->cache_type;
    vf sum = {0};
    for (uint64_t i = 0; i < rank; i += HC_W) {
        vf x = v_load_up_to_as(hc_at(from, i, type), rank - i, type);
        sum = v_fma(x, x, sum);
    }
    float factor = (float)(1.0 / sqrt((double)v_sum(sum) / (double)rank + op->eps));
    for (uint64_t i = 0; i < rank; i += HC_W) {
        uint64_t left = rank - i;
        vf weight = v_load_up_to_as(hc_at(op->norm_weight, i, type), left, type);
        v_store_up_to_as(hc_to(to, i, to_type), v_load_up_to_as(hc_at(from, i, type), left, type) * factor * weight,
                         left, to_type);
    }
}

/* A row has a unit for each query head, and one for what is cached. */
V_INLINE void make_units(const hc_latent_op *op, uint64_t begin, uint64_t end, const uint64_t type) {
    uint64_t units = op->heads + 1, width = op->rank + op->rope, query_width = op->nope + op->rope;
    for (uint64_t unit = begin; unit < end; unit++) {
        uint64_t row = unit / units, head = unit % units, position = (uint64_t)op->positions[row] * op->rope;
        const void *cos = hc_at(op->cos, position, type), *signed_sin = hc_at(op->signed_sin, position, type);
        if (head < op->heads) {
            uint64_t index = row * op->heads + head;
            rotate_to(hc_to(op->out, index * width + op->rank, type), type,
                      hc_at(op->query, index * query_width + op->nope, type), cos, signed_sin, op->rope, type);
            continue;
        }
        const void *from = hc_at(op->compressed, row * width, type);
        void *key = hc_to(op->keys, (uint64_t)op->slots[row] * width, op->cache_type);
        norm_to(key, from, op, type);
        rotate_to(hc_to(key, op->rank, op->cache_type), op->cache_type, hc_at(from, op->rank, type), cos, signed_sin, op->rope, type);
    }
}

void HC_NAME(latent)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_latent_op *op = (const hc_latent_op *)header;
    uint64_t begin, end;
    hc_share_of(header->rows * (op->heads + 1), crew->size, member, &begin, &end);
    V_TYPED(op->type, make_units, op, begin, end);
}

/* Each product is one member's, for up to HC_FEW_ROWS rows at a time: it meets nobody. */
void HC_NAME(heads)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_heads_op *op = (const hc_heads_op *)header;
    uint64_t pieces = (header->rows + HC_FEW_ROWS - 1) / HC_FEW_ROWS, begin, end;
    char *scratch = (char *)op->scratch + member * hc_heads_member_bytes(op);
    hc_crew alone = {1, NULL};
    hc_share_of(op->heads * pieces, crew->size, member, &begin, &end);
    for (uint64_t unit = begin; unit < end; unit++) {
        uint64_t head = unit / pieces, row = unit % pieces * HC_FEW_ROWS, left = header->rows - row;
        const void *x = hc_at(op->x, row * op->x_stride + head * op->x_head_stride, op->type);
        void *y = hc_to(op->y, row * op->y_stride + head * op->y_head_stride, op->type);
        hc_linear_op one = {{HC_LINEAR, left < HC_FEW_ROWS ? left : HC_FEW_ROWS}, op->weights[head], op->type, op->type,
                            x, op->x_stride, NULL, y, op->y_stride, scratch};
        HC_NAME(linear)(&one.op, &alone, 0);
    }
}
