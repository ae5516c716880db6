/* Which experts a row goes to. Compiled so that no product is added in one rounding: numbers are those of hc_route_op's rule
 * on every instruction set, and torch's operators come to them, too.
 *
 * A sum is of blocks of 256 terms, which are 16 vectors of 16 lanes: the second half of the vectors is added to the first
 * until one is left; blocks' vectors are added in their order; then lanes are halved as the vectors were. What is missing of
 * the last block is 0. */
#include "choosing.h"
#include "exponential.h"
#include "route.h"

extern hc_kernel HC_NAME(route);

V_INLINE vf term(const float *a, const float *b, int at) {
    vf x = v_load(a + at * HC_LANES);
    return b ? x * v_load(b + at * HC_LANES) : x;
}

V_INLINE vf of_two(const float *a, const float *b, int at) { return term(a, b, at) + term(a, b, at + 8); }

V_INLINE vf of_four(const float *a, const float *b, int at) { return of_two(a, b, at) + of_two(a, b, at + 4); }

V_INLINE vf of_eight(const float *a, const float *b, int at) { return of_four(a, b, at) + of_four(a, b, at + 2); }

/* The sum of a[i] * b[i], or of a[i] if b is NULL; both are filled up with zeros to whole blocks. */
V_INLINE float sum_of(const float *a, const float *b, uint64_t count) {
    float lanes[HC_LANES];
    for (uint64_t lane = 0; lane < HC_LANES; lane += HC_W) {
        vf total = v_all(0);
        for (uint64_t i = lane; i < count; i += HC_SUM_BLOCK) {
            const float *its = b ? b + i : NULL;
            vf block = of_eight(a + i, its, 0) + of_eight(a + i, its, 1);
            total = i > lane ? total + block : block;
        }
        v_store(lanes + lane, total);
    }
    for (int half = HC_LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            lanes[i] += lanes[i + half];
    return lanes[0];
}

/* Floats of any format, filled up with zeros to whole blocks. */
static void widen_row(const void *from, uint64_t type, uint64_t count, float *to) {
    uint64_t i = 0;
    for (; i < count; i += HC_W)
        v_store(to + i, v_load_up_to_as(hc_at(from, i, type), count - i, type));
    memset(to + i, 0, (hc_round_up(count, HC_SUM_BLOCK) - i) * sizeof *to);
}

/* 1 over the root of what is more than 0, in Newton's steps: roots are not rounded alike everywhere. */
static float inverse_root(float x) {
    uint32_t bits;
    float y, half = x * 0.5f;
    memcpy(&bits, &x, sizeof bits);
    bits = 0x5f375a86u - (bits >> 1);
    memcpy(&y, &bits, sizeof y);
    for (int step = 0; step < 4; step++)
        y = y * (1.5f - half * y * y);
    return y;
}

/* A row's choice in the making. */
typedef struct {
    const hc_route_op *op;
    float *logits, *scores, *preferred; /* filled up to whole vectors at least */
    float *own;                         /* room for a sum's terms */
    int64_t *chosen;
    float *shares;
} hc_choice;

/* Whether the value at `at` is the one at `last`, or comes before it in the order of a choice. */
V_INLINE int is_before(const float *values, uint64_t at, uint64_t last) {
    return hc_beats(values[at], values[last]) || (at <= last && !hc_beats(values[last], values[at]));
}

/* The number of the value that follows the one at `last`; with is_first, of the best one. */
static uint64_t next_best(const float *values, uint64_t count, uint64_t last, int is_first) {
    uint64_t best = count;
    for (uint64_t i = 0; i < count; i++)
        if ((is_first || !is_before(values, i, last)) && (best == count || hc_beats(values[i], values[best])))
            best = i;
    return best;
}

/* Takes what is not in the best groups out of `preferred`. */
static void keep_groups(const hc_choice *row) {
    const hc_route_op *op = row->op;
    uint64_t size = op->experts / op->groups, last = 0;
    float *sums = row->own;
    for (uint64_t group = 0; group < op->groups; group++) {
        const float *its = row->preferred + group * size;
        uint64_t best = next_best(its, size, 0, 1);
        sums[group] = size > 1 ? its[best] + its[next_best(its, size, best, 0)] : its[best];
    }
    for (uint64_t i = 0; i < op->kept_groups; i++)
        last = next_best(sums, op->groups, last, !i);
    for (uint64_t i = 0; i < op->experts; i++)
        if (!is_before(sums, i / size, last))
            row->preferred[i] = -INFINITY;
}

static void choose_experts(const hc_choice *row) {
    const hc_route_op *op = row->op;
    uint64_t last = 0;
    for (uint64_t i = 0; i < op->experts; i += HC_W) {
        vf logits = v_load(row->logits + i);
        if (op->bias)
            logits = logits + v_load_up_to(op->bias + i, op->experts - i);
        vf scores = op->score == HC_SIGMOID ? 1.0f / (hc_exponential(-logits) + 1.0f) : logits, preferred = scores;
        if (op->correction)
            preferred = scores + v_load_up_to(op->correction + i, op->experts - i);
        v_store(row->logits + i, logits);
        v_store(row->scores + i, scores);
        v_store(row->preferred + i, preferred);
    }
    if (op->kept_groups < op->groups)
        keep_groups(row);
    for (uint64_t i = 0; i < op->per_token; i++)
        row->chosen[i] = (int64_t)(last = next_best(row->preferred, op->experts, last, !i));
}

/* The sum of `count` terms that lie in the row's room. */
static float sum_own(const hc_choice *row, uint64_t count) {
    uint64_t all = hc_round_up(count, HC_SUM_BLOCK);
    memset(row->own + count, 0, (all - count) * sizeof *row->own);
    return sum_of(row->own, NULL, all);
}

static void exponentials(const float *logits, uint64_t count, float largest, float *to) {
    for (uint64_t i = 0; i < count; i += HC_W)
        v_store_up_to(to + i, hc_exponential(v_load_up_to(logits + i, count - i) - largest), count - i);
}

static void weigh(const hc_choice *row) {
    const hc_route_op *op = row->op;
    uint64_t number = op->per_token;
    float sum = 1.0f, scale = (float)op->scale;
    for (uint64_t i = 0; i < number; i++)
        row->shares[i] = row->scores[row->chosen[i]];
    if (op->score == HC_SOFTMAX) {
        uint64_t best = next_best(row->logits, op->experts, 0, 1);
        float largest = row->logits[best];
        if (!op->is_normalised) {
            exponentials(row->logits, op->experts, largest, row->own);
            sum = sum_own(row, op->experts);
        }
        exponentials(row->shares, number, largest, row->shares);
    }
    if (op->is_normalised) {
        memcpy(row->own, row->shares, number * sizeof *row->own);
        sum = sum_own(row, number);
    }
    for (uint64_t i = 0; i < number; i++)
        row->shares[i] = row->shares[i] / sum * scale * (op->factors ? op->factors[row->chosen[i]] : 1.0f);
}

/* Brings the choices into the order of their shares; equals stay as they are. */
static void order_by_share(const hc_choice *row) {
    for (uint64_t i = 1; i < row->op->per_token; i++) {
        int64_t expert = row->chosen[i];
        float share = row->shares[i];
        uint64_t to = i;
        for (; to && row->shares[to - 1] < share; to--) {
            row->chosen[to] = row->chosen[to - 1];
            row->shares[to] = row->shares[to - 1];
        }
        row->chosen[to] = expert;
        row->shares[to] = share;
    }
}

/* Rows' states times norm weights, and 1 over the roots of their mean squares. */
static void prepare(const hc_route_op *op, const hc_route_room *room, uint64_t first, uint64_t begin, uint64_t end,
                    float *own) {
    float *scratch = op->scratch, inverse = (float)(1.0 / (double)op->width), eps = (float)op->eps;
    widen_row(op->norm_weight, op->norm_type, op->width, own);
    for (uint64_t row = begin; row < end; row++) {
        float *normed = scratch + room->normed + row * room->width;
        widen_row(hc_at(op->hidden, (first + row) * op->width, op->type), op->type, op->width, normed);
        float mean = sum_of(normed, normed, room->width) * inverse;
        scratch[room->factors + row] = inverse_root(mean + eps);
        for (uint64_t i = 0; i < room->width; i += HC_W)
            v_store(normed + i, v_load(normed + i) * v_load(own + i));
    }
}

/* Of experts [begin, end), of so many rows. */
static void multiply(const hc_route_op *op, const hc_route_room *room, uint64_t rows, uint64_t begin, uint64_t end,
                     float *own) {
    float *scratch = op->scratch;
    for (uint64_t expert = begin; expert < end; expert++) {
        widen_row(hc_at(op->weight, expert * op->width, op->weight_type), op->weight_type, op->width, own);
        for (uint64_t row = 0; row < rows; row++)
            scratch[room->logits + row * room->experts + expert] =
                sum_of(scratch + room->normed + row * room->width, own, room->width) * scratch[room->factors + row];
    }
}

void HC_NAME(route)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_route_op *op = (const hc_route_op *)header;
    hc_route_room room = hc_route_room_of(op);
    float *scratch = op->scratch, *own = (float *)((char *)op->scratch + room.bytes + member * hc_route_member_bytes(op));
    for (uint64_t first = 0; first < header->rows; first += room.rows) {
        uint64_t rows = header->rows - first < room.rows ? header->rows - first : room.rows, begin, end;
        hc_share_of(rows, crew->size, member, &begin, &end);
        prepare(op, &room, first, begin, end, own);
        hc_meet(crew);
        hc_share_of(op->experts, crew->size, member, &begin, &end);
        multiply(op, &room, rows, begin, end, own);
        hc_meet(crew);
        hc_share_of(rows, crew->size, member, &begin, &end);
        for (uint64_t row = begin; row < end; row++) {
            uint64_t at = row * room.experts, out = (first + row) * op->per_token;
            hc_choice choice = {op, scratch + room.logits + at, scratch + room.scores + at, scratch + room.preferred + at,
                                own, op->chosen + out, op->shares + out};
            choose_experts(&choice);
            weigh(&choice);
            if (op->by_share)
                order_by_share(&choice);
        }
        if (first + rows < header->rows)
            hc_meet(crew); /* before what was read is written for the next ones */
    }
}
