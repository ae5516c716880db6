/* The best score of each row, as argmax has it: the first of equals, and what is no number counts as the largest of all.
 * Scores are numbers themselves, or for draws numbers divided by a temperature with noise added. Members share the columns
 * of every row, for a step may have one row only. */
#include "choosing.h"
#include "noise.h"

extern hc_kernel HC_NAME(choose);

#define NONE UINT32_MAX /* the column of a share without columns */
#define GROUP (8 * HC_PER_COUNTER) /* columns whose noise is bounded at a time */

/* From `begin` on; there is one. */
static hc_found first_nan(const float *x, uint64_t begin) {
    while (x[begin] == x[begin])
        begin++;
    return (hc_found){x[begin], (uint32_t)begin};
}

/* Of columns [begin, end), which are not none. A lane keeps the first of its largest, and where that began. */
static hc_found first_largest(const float *x, uint64_t begin, uint64_t end) {
    hc_found best = {x[begin], (uint32_t)begin};
    uint64_t i = begin;
    if (end - begin >= HC_W) {
        vf largest = v_load(x + begin);
        vi at = v_all_of(0), nans = largest != largest;
        for (i += HC_W; i + HC_W <= end; i += HC_W) {
            vf v = v_load(x + i);
            vi is_larger = v > largest;
            nans |= v != v;
            at = (is_larger & v_all_of((int32_t)(i - begin))) | (~is_larger & at);
            largest = v_choose(is_larger, v, largest);
        }
        if (v_any(nans))
            return first_nan(x, begin);
        for (int lane = 0; lane < HC_W; lane++) {
            uint32_t column = (uint32_t)(begin + (uint64_t)at[lane] + (uint64_t)lane);
            if (largest[lane] > best.score || (largest[lane] == best.score && column < best.column))
                best = (hc_found){largest[lane], column};
        }
    }
    for (; i < end; i++)
        if (hc_beats(x[i], best.score))
            best = (hc_found){x[i], (uint32_t)i};
    return best;
}

/* A row that is drawn from. */
typedef struct {
    const float *x;
    float temperature;
    hc_noise_key key;
    uint64_t first; /* the vocabulary row of x[0] */
} hc_drawn_row;

/* Whether one of GROUP columns from `begin` on may beat the best score, or its word is coarse. Few groups may: a row's best
 * score is beaten some ten times. So most noise is bounded only, by far less than its logarithms take. */
V_INLINE int may_beat(const hc_drawn_row *row, uint64_t begin, const uint32_t *words, float best) {
    vi may = v_all_of(0);
    for (uint64_t i = 0; i < GROUP; i += HC_W) {
        vf numbers = hc_numbers(words + i);
        vf most = v_load(row->x + begin + i) / row->temperature + hc_gumbel_bound(numbers);
        may |= ~(most <= best) | (numbers < HC_COARSE);
    }
    return v_any(may);
}

/* Looks at columns [begin, begin + count), at most GROUP. */
static void consider(const hc_drawn_row *row, uint64_t begin, uint64_t count, const uint32_t *words, hc_found *best) {
    float numbers[GROUP], scores[GROUP];
    for (uint64_t i = 0; i < count; i += HC_W)
        v_store(numbers + i, hc_numbers(words + i));
    for (uint64_t i = 0; i < count; i++)
        if (numbers[i] < HC_COARSE)
            numbers[i] = hc_exact_number(words[i], row->key, row->first + begin + i);
    for (uint64_t i = 0; i < count; i += HC_W) {
        vf scaled = v_load_up_to(row->x + begin + i, count - i) / row->temperature;
        v_store(scores + i, hc_gumbel(v_load(numbers + i)) + scaled);
    }
    for (uint64_t i = 0; i < count; i++)
        if (hc_beats(scores[i], best->score))
            *best = (hc_found){scores[i], (uint32_t)(begin + i)};
}

/* Of columns [begin, end), which are not none. */
static hc_found first_best_draw(const hc_drawn_row *row, uint64_t begin, uint64_t end) {
    union {
        uint64_t by_counter[GROUP / HC_PER_COUNTER][4];
        uint32_t words[2 * GROUP]; /* vectors that begin within the group end here */
    } noise;
    hc_found best = {-INFINITY, (uint32_t)begin};
    memset(&noise, 0, sizeof noise);
    while (begin < end && best.score == best.score) {
        uint64_t skip = (row->first + begin) % GROUP, counter = (row->first + begin - skip) / HC_PER_COUNTER;
        uint64_t count = end - begin < GROUP - skip ? end - begin : GROUP - skip;
        for (uint64_t i = 0; i < GROUP / HC_PER_COUNTER; i++)
            hc_philox(row->key, counter + i, noise.by_counter[i]);
        if (count < GROUP || may_beat(row, begin, noise.words, best.score))
            consider(row, begin, count, noise.words + skip, &best);
        begin += count;
    }
    return best;
}

static hc_found best_of(const hc_choose_op *op, uint64_t row, uint64_t begin, uint64_t end) {
    const float *x = op->x + row * op->columns;
    if (begin == end)
        return (hc_found){0.0f, NONE};
    if (!op->temperatures || op->temperatures[row] == 0.0f)
        return first_largest(x, begin, end);
    uint64_t position = (uint64_t)op->positions[op->inputs ? (uint64_t)op->inputs[row] : row] + 1;
    hc_drawn_row drawn = {x, op->temperatures[row], {op->seeds[row], position}, op->first};
    return first_best_draw(&drawn, begin, end);
}

void HC_NAME(choose)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_choose_op *op = (const hc_choose_op *)header;
    uint64_t rows = header->rows, begin, end;
    hc_found *found = op->scratch; /* [members, rows] */
    hc_share_of(op->columns, crew->size, member, &begin, &end);
    for (uint64_t row = 0; row < rows; row++)
        found[member * rows + row] = best_of(op, row, begin, end);
    hc_meet(crew);
    hc_share_of(rows, crew->size, member, &begin, &end);
    for (uint64_t row = begin; row < end; row++) {
        hc_found best = {0.0f, NONE};
        for (uint64_t other = 0; other < crew->size; other++) {
            hc_found its = found[other * rows + row];
            if (its.column != NONE && (best.column == NONE || hc_beats(its.score, best.score)))
                best = its;
        }
        for (uint64_t shard = 0; shard < op->shards; shard++)
            memset(op->best + 2 * (shard * rows + row), 0, 2 * sizeof *op->best);
        float *place = op->best + 2 * (op->shard * rows + row);
        place[0] = best.score;
        place[1] = (float)(op->first + best.column);
    }
}
