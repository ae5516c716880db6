/* The gated delta rule (arXiv:2412.06464). A member computes all tokens of a value head of a sequence, one after
 * another and each by the same steps, so a row has the same bits wherever its sequence is cut into operations.
 *
 * Let S be the matrix before a token with decay a, gate b, key k, query q and value v. Then u = b (v - a S'k), the
 * output is a S'q + (k.q) u, and the matrix becomes a S + k u'. So the matrix is read once a token: while it is updated
 * for one token, it is multiplied by the next one's key and query. */
#include "delta.h"
#include "vectors.h"

extern hc_kernel HC_NAME(delta);

#define VECTORS (HC_W == 16 ? 8 : 4) /* of columns that are computed at once: as many as registers hold */
#define KEY_EPS 1e-6                 /* added to the squared length of queries and keys */
#define PIECE 64                     /* channels of a window that are one member's */

typedef struct {
    float *key, *query;
    float decay, opening;
    float product; /* of key and query */
} hc_delta_token;

/* A value head of a sequence, and a member's scratch. */
typedef struct {
    const hc_delta_op *op;
    uint64_t sequence, head;
    int is_fresh;        /* it begins with these tokens, and with empty states */
    float *matrix;       /* [key_dim, value_dim] */
    const float *window; /* [taps - 1, channels] */
    hc_delta_token tokens[2];
    float *value, *update, *of_key, *of_query; /* [value_dim] */
} hc_delta_head;

static uint64_t channels_of(const hc_delta_op *op) {
    return 2 * op->key_heads * op->key_dim + op->value_heads * op->value_dim;
}

static uint64_t width_of(const hc_delta_op *op) { return channels_of(op) + op->value_heads * op->value_dim; }

static int is_fresh(const hc_delta_op *op, uint64_t sequence) {
    return (uint64_t)op->lengths[sequence] == op->tokens;
}

static float *window_of(const hc_delta_op *op, uint64_t sequence) {
    return op->windows + (uint64_t)op->slots[sequence] * (op->taps - 1) * channels_of(op);
}

static hc_delta_head head_of(const hc_delta_op *op, uint64_t unit, float *scratch) {
    uint64_t keys = hc_round_up(op->key_dim, HC_DELTA_UNIT), values = hc_round_up(op->value_dim, HC_DELTA_UNIT);
    uint64_t sequence = unit / op->value_heads, head = unit % op->value_heads;
    uint64_t place = (uint64_t)op->slots[sequence] * op->value_heads + head;
    float *value = scratch + 4 * keys;
    return (hc_delta_head){op,
                           sequence,
                           head,
                           is_fresh(op, sequence),
                           op->matrices + place * op->key_dim * op->value_dim,
                           window_of(op, sequence),
                           {{scratch, scratch + keys, 0, 0, 0}, {scratch + 2 * keys, scratch + 3 * keys, 0, 0, 0}},
                           value,
                           value + values,
                           value + 2 * values,
                           value + 3 * values};
}

/* silu of the causal convolution of channels [begin, begin + count), to `to`. */
V_INLINE void convolve(const hc_delta_head *of, uint64_t token, uint64_t begin, uint64_t count, float *to,
                       const uint64_t type) {
    const hc_delta_op *op = of->op;
    uint64_t before = op->taps - 1, channels = channels_of(op), width = width_of(op);
    uint64_t first = of->sequence * op->tokens;
    for (uint64_t i = 0; i < count; i += HC_W) {
        uint64_t left = count - i, channel = begin + i;
        vf sum = {0};
        for (uint64_t tap = 0; tap < op->taps; tap++) {
            uint64_t place = token + tap; /* the window's inputs, then the tokens' */
            vf x;
            if (place >= before)
                x = v_load_up_to_as(hc_at(op->mixed, (first + place - before) * width + channel, type), left, type);
            else if (of->is_fresh)
                continue;
            else
                x = v_load_up_to(of->window + place * channels + channel, left);
            sum = v_fma(x, v_load_up_to(op->convolution + tap * channels + channel, left), sum);
        }
        v_store_up_to(to + i, v_silu(sum), left);
    }
}

V_INLINE float product_of(const float *a, const float *b, uint64_t count) {
    vf sum = {0};
    for (uint64_t i = 0; i < count; i += HC_W)
        sum = v_fma(v_load_up_to(a + i, count - i), v_load_up_to(b + i, count - i), sum);
    return v_sum(sum);
}

/* Gives x the length `length`. */
V_INLINE void normalise(float *x, uint64_t count, double length) {
    float factor = (float)(length / sqrt((double)product_of(x, x, count) + KEY_EPS));
    for (uint64_t i = 0; i < count; i += HC_W)
        v_store_up_to(x + i, v_load_up_to(x + i, count - i) * factor, count - i);
}

static double number_at(const void *p, uint64_t index, uint64_t type) {
    return (double)v_load_up_to_as(hc_at(p, index, type), 1, type)[0];
}

/* What a token is to its head: key, query and value, what it opens and what it leaves of the matrix. */
V_INLINE void take(hc_delta_head *of, uint64_t token, hc_delta_token *to, const uint64_t type) {
    const hc_delta_op *op = of->op;
    uint64_t keys = op->key_heads * op->key_dim, heads = op->value_heads, head = of->head;
    uint64_t at = head / (heads / op->key_heads) * op->key_dim, row = of->sequence * op->tokens + token;
    convolve(of, token, at, op->key_dim, to->query, type);
    convolve(of, token, keys + at, op->key_dim, to->key, type);
    convolve(of, token, 2 * keys + head * op->value_dim, op->value_dim, of->value, type);
    normalise(to->query, op->key_dim, 1.0 / sqrt((double)op->key_dim));
    normalise(to->key, op->key_dim, 1.0);
    to->product = product_of(to->key, to->query, op->key_dim);
    double b = number_at(op->gates, row * 2 * heads + head, type);
    double x = number_at(op->gates, row * 2 * heads + heads + head, type) + (double)op->decay_bias[head];
    double softplus = log1p(exp(-fabs(x))) + (x > 0 ? x : 0);
    to->opening = (float)(1.0 / (1.0 + exp(-b)));
    to->decay = (float)exp((double)op->decay[head] * softplus);
}

/* Of the first `count` columns of each of `vectors` vectors: what `last` adds, unless it is NULL; and, unless `next` is
 * NULL, the sums with its key and query. Each column's sum is made in the order of rows. */
V_INLINE void sweep_columns(const hc_delta_head *of, uint64_t column, const int vectors, uint64_t count,
                            const hc_delta_token *last, const hc_delta_token *next) {
    uint64_t stride = of->op->value_dim, rows = of->op->key_dim;
    float *matrix = of->matrix + column;
    vf update[VECTORS], of_key[VECTORS], of_query[VECTORS];
    for (int v = 0; v < vectors; v++) {
        update[v] = last ? v_load_up_to(of->update + column + v * HC_W, count) : (vf){0};
        of_key[v] = of_query[v] = (vf){0};
    }
    for (uint64_t row = 0; row < rows; row++) {
        float *at = matrix + row * stride;
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            vf s = v_load_up_to(at + v * HC_W, count);
            if (last) {
                s = v_fma(v_all(last->key[row]), update[v], s * last->decay);
                v_store_up_to(at + v * HC_W, s, count);
            }
            if (next) {
                of_key[v] = v_fma(s, v_all(next->key[row]), of_key[v]);
                of_query[v] = v_fma(s, v_all(next->query[row]), of_query[v]);
            }
        }
    }
    for (int v = 0; next && v < vectors; v++) {
        v_store_up_to(of->of_key + column + v * HC_W, of_key[v], count);
        v_store_up_to(of->of_query + column + v * HC_W, of_query[v], count);
    }
}

V_INLINE void sweep(const hc_delta_head *of, const hc_delta_token *last, const hc_delta_token *next) {
    uint64_t columns = of->op->value_dim, column = 0;
    for (; column + VECTORS * HC_W <= columns; column += VECTORS * HC_W)
        sweep_columns(of, column, VECTORS, HC_W, last, next);
    for (; column < columns; column += HC_W)
        sweep_columns(of, column, 1, columns - column < HC_W ? columns - column : HC_W, last, next);
}

/* The token's update of the matrix, and its output: normed, times silu(z). */
V_INLINE void finish(const hc_delta_head *of, const hc_delta_token *of_token, uint64_t token, const uint64_t type) {
    const hc_delta_op *op = of->op;
    uint64_t dim = op->value_dim, values = op->value_heads * dim, row = of->sequence * op->tokens + token;
    const void *z = hc_at(op->mixed, row * width_of(op) + channels_of(op) + of->head * dim, type);
    void *y = hc_to(op->y, row * values + of->head * dim, type);
    float *output = of->of_query;
    vf squares = {0};
    for (uint64_t i = 0; i < dim; i += HC_W) {
        uint64_t left = dim - i;
        vf seen = v_load_up_to(of->of_key + i, left);
        vf update = v_fma(seen, v_all(-of_token->decay), v_load_up_to(of->value + i, left)) * of_token->opening;
        vf x = v_fma(update, v_all(of_token->product), v_load_up_to(output + i, left) * of_token->decay);
        v_store_up_to(of->update + i, update, left);
        v_store_up_to(output + i, x, left);
        squares = v_fma(x, x, squares);
    }
    float factor = (float)(1.0 / sqrt((double)v_sum(squares) / (double)dim + op->eps));
    for (uint64_t i = 0; i < dim; i += HC_W) {
        uint64_t left = dim - i;
        vf normed = v_load_up_to(output + i, left) * factor * v_load_up_to(op->norm + i, left);
        vf gate = v_silu(v_load_up_to_as(hc_at(z, i, type), left, type));
        v_store_up_to_as(hc_to(y, i, type), normed * gate, left, type);
    }
}

V_INLINE void compute_heads(const hc_delta_op *op, uint64_t begin, uint64_t end, float *scratch, const uint64_t type) {
    for (uint64_t unit = begin; unit < end; unit++) {
        hc_delta_head of = head_of(op, unit, scratch);
        const hc_delta_token *last = NULL;
        if (of.is_fresh)
            memset(of.matrix, 0, op->key_dim * op->value_dim * sizeof(float));
        for (uint64_t token = 0; token < op->tokens; token++) {
            hc_delta_token *next = &of.tokens[token & 1];
            take(&of, token, next, type);
            if (last)
                sweep(&of, last, next);
            else
                sweep(&of, NULL, next);
            finish(&of, next, token, type);
            last = next;
        }
        if (last)
            sweep(&of, last, NULL);
    }
}

/* The last taps - 1 of the window's inputs and the tokens'. */
V_INLINE void keep_inputs(const hc_delta_op *op, uint64_t begin, uint64_t end, const uint64_t type) {
    uint64_t before = op->taps - 1, channels = channels_of(op), width = width_of(op);
    uint64_t pieces = (channels + PIECE - 1) / PIECE;
    for (uint64_t unit = begin; unit < end; unit++) {
        uint64_t sequence = unit / pieces, channel = unit % pieces * PIECE, left = channels - channel;
        uint64_t count = left < PIECE ? left : PIECE;
        float *window = window_of(op, sequence) + channel;
        for (uint64_t to = 0; to < before; to++) {
            uint64_t place = op->tokens + to;
            uint64_t row = sequence * op->tokens + place - before; /* unless it is in the window */
            const void *x = place < before ? NULL : hc_at(op->mixed, row * width + channel, type);
            for (uint64_t i = 0; i < count; i += HC_W) {
                vf kept = {0};
                if (x)
                    kept = v_load_up_to_as(hc_at(x, i, type), count - i, type);
                else if (!is_fresh(op, sequence))
                    kept = v_load_up_to(window + place * channels + i, count - i);
                v_store_up_to(window + to * channels + i, kept, count - i);
            }
        }
    }
}

/* The window of channels of a key head is read with each of its value heads: it is written when all are done. */
void HC_NAME(delta)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_delta_op *op = (const hc_delta_op *)header;
    float *scratch = (float *)((char *)op->scratch + member * hc_delta_member_bytes(op));
    uint64_t begin, end;
    hc_share_of(header->rows * op->value_heads, crew->size, member, &begin, &end);
    V_TYPED(op->type, compute_heads, op, begin, end, scratch);
    hc_meet(crew);
    hc_share_of(header->rows * ((channels_of(op) + PIECE - 1) / PIECE), crew->size, member, &begin, &end);
    V_TYPED(op->type, keep_inputs, op, begin, end);
}
