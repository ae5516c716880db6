/* The best score of each row, as argmax has it: the first of equals, and what is no number counts as the largest of all.
 * Scores are numbers themselves, or for draws numbers divided by a temperature with noise added, of the columns that
 * filters leave. Members share the columns of every row, for a step may have one row only. */
#include <float.h>

#include "choosing.h"
#include "filters.h"
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
    hc_place last;  /* of those that are left */
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
    float numbers[GROUP], values[GROUP];
    for (uint64_t i = 0; i < count; i += HC_W)
        v_store(numbers + i, hc_numbers(words + i));
    for (uint64_t i = 0; i < count; i++)
        if (numbers[i] < HC_COARSE)
            numbers[i] = hc_exact_number(words[i], row->key, row->first + begin + i);
    for (uint64_t i = 0; i < count; i += HC_W) {
        vf scaled = v_load_up_to(row->x + begin + i, count - i) / row->temperature;
        v_store(numbers + i, hc_gumbel(v_load(numbers + i)) + scaled);
        v_store(values + i, scaled);
    }
    for (uint64_t i = 0; i < count; i++) {
        uint32_t column = (uint32_t)(begin + i);
        int is_left = !(values[i] < row->last.value) && (values[i] != row->last.value || (int32_t)column <= row->last.column);
        if (is_left && (hc_beats(numbers[i], best->score) || (numbers[i] == best->score && column < best->column)))
            *best = (hc_found){numbers[i], column};
    }
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

/* Of listed columns, each of which has noise of its own computed. */
static hc_found best_listed(const hc_drawn_row *row, const hc_view *list) {
    hc_found best = {-INFINITY, NONE};
    for (uint64_t i = 0; i < list->count; i++) {
        if (list->x[i] < row->last.value)
            continue;
        union {
            uint64_t by_counter[4];
            uint32_t words[HC_PER_COUNTER + HC_W]; /* vectors that begin at a word end here */
        } noise;
        uint64_t column = (uint64_t)list->columns[i], id = row->first + column;
        memset(&noise, 0, sizeof noise);
        hc_philox(row->key, id / HC_PER_COUNTER, noise.by_counter);
        consider(row, column, 1, noise.words + id % HC_PER_COUNTER, &best);
    }
    return best;
}

static inline int has_nucleus(const hc_choose_op *op, uint64_t row) { return op->top_p[row] > 0.0 && op->top_p[row] < 1.0; }

static int is_filtered(const hc_choose_op *op, uint64_t row) {
    if (!op->top_k || op->temperatures[row] == 0.0f)
        return 0;
    return op->top_k[row] || has_nucleus(op, row) || op->min_logs[row] > -INFINITY;
}

static hc_drawn_row drawn_row(const hc_choose_op *op, uint64_t row, hc_place last) {
    uint64_t position = (uint64_t)op->positions[op->inputs ? (uint64_t)op->inputs[row] : row] + 1;
    return (hc_drawn_row){op->x + row * op->columns, op->temperatures[row], {op->seeds[row], position}, op->first, last};
}

static hc_found best_of(const hc_choose_op *op, uint64_t row, uint64_t begin, uint64_t end) {
    if (begin == end)
        return (hc_found){0.0f, NONE};
    if (!op->temperatures || op->temperatures[row] == 0.0f || is_filtered(op, row))
        return first_largest(op->x + row * op->columns, begin, end);
    hc_drawn_row drawn = drawn_row(op, row, hc_all_places);
    return first_best_draw(&drawn, begin, end);
}

/* The best that members have found of a row. */
static hc_found best_found(const hc_choose_op *op, uint64_t row, uint64_t size) {
    const hc_found *found = op->scratch;
    hc_found best = {0.0f, NONE};
    for (uint64_t member = 0; member < size; member++) {
        hc_found its = found[member * op->op.rows + row];
        if (its.column != NONE && (best.column == NONE || hc_beats(its.score, best.score)))
            best = its;
    }
    return best;
}

/* A filtered row in the making. */
typedef struct {
    hc_filtered *state;
    float *values;    /* [HC_LISTED] */
    int32_t *columns; /* [HC_LISTED] */
    float *strips;
    hc_view whole;
} hc_filtered_row;

static hc_filtered *state_of(const hc_choose_op *op, uint64_t row, uint64_t size) {
    char *states = (char *)op->scratch + size * op->op.rows * sizeof(hc_found);
    return (hc_filtered *)(states + row * hc_filter_bytes(op->columns));
}

static float *strips_of(hc_filtered *state) { return (float *)(state + 1) + 2 * HC_LISTED; }

/* Once all members have found their best. */
static hc_filtered_row filtered_row(const hc_choose_op *op, uint64_t row, uint64_t size) {
    hc_filtered *state = state_of(op, row, size);
    float *values = (float *)(state + 1), temperature = op->temperatures[row];
    hc_view whole = {op->x + row * op->columns, NULL, op->columns, temperature, best_found(op, row, size).score / temperature};
    return (hc_filtered_row){state, values, (int32_t *)(values + HC_LISTED), strips_of(state), whole};
}

/* Whether something can be drawn; if not, the score tells why. */
static inline int is_drawable(const hc_filtered_row *row) { return fabsf(row->whole.largest) <= FLT_MAX; }

/* The largest of each strip of columns [begin, end), in which no more than the last strips are cut off. */
static void keep_strips(const float *x, uint64_t begin, uint64_t end, float *strips) {
    for (uint64_t group = begin; group < end; group += HC_GROUP_COLUMNS, strips += HC_LANES)
        for (uint64_t lane = 0; lane < HC_LANES; lane += HC_W) {
            vf largest = v_all(-INFINITY);
            for (uint64_t i = group + lane; i < end && i < group + HC_GROUP_COLUMNS; i += HC_LANES) {
                vf value = end - i < HC_W ? v_all(-INFINITY) : v_load(x + i);
                for (uint64_t rest = 0; end - i < HC_W && rest < end - i; rest++)
                    value[rest] = x[i + rest];
                largest = v_choose(value > largest, value, largest);
            }
            v_store(strips + lane, largest);
        }
}

static void find_floor(const hc_choose_op *op, uint64_t at, const hc_filtered_row *row) {
    uint64_t strips = hc_strips_of(op->columns), wanted = op->top_k[at] ? op->top_k[at] : HC_WANTED;
    hc_view view = {row->strips, NULL, strips, row->whole.temperature, row->whole.largest};
    row->state->floor = wanted < strips ? hc_value_of(&view, wanted, 1) : -INFINITY;
}

static void list_column(const hc_filtered_row *row, uint64_t column) {
    float value = row->whole.x[column] / row->whole.temperature;
    if (value < row->state->floor || value == -INFINITY)
        return;
    uint32_t place = atomic_fetch_add_explicit(&row->state->listed, 1, memory_order_relaxed);
    if (place < HC_LISTED) {
        row->values[place] = value;
        row->columns[place] = (int32_t)column;
    }
}

/* Of columns [begin, end), which begin with a group of strips. */
static void list_and_weigh(const hc_choose_op *op, uint64_t at, const hc_filtered_row *row, uint64_t begin, uint64_t end) {
    float floor = row->state->floor, temperature = row->whole.temperature;
    const float *strips = row->strips + begin / HC_GROUP_COLUMNS * HC_LANES;
    for (uint64_t group = begin; group < end; group += HC_GROUP_COLUMNS, strips += HC_LANES)
        for (uint64_t lane = 0; lane < HC_LANES; lane += HC_W) {
            vi reach = ~(v_load(strips + lane) / temperature < floor);
            uint64_t last = end - group < HC_GROUP_COLUMNS ? end : group + HC_GROUP_COLUMNS;
            for (uint64_t i = 0; v_any(reach) && i < HC_W; i++)
                for (uint64_t column = group + lane + i; reach[i] && column < last; column += HC_LANES)
                    list_column(row, column);
        }
    if (has_nucleus(op, at) && !op->top_k[at]) {
        hc_view its = {row->whole.x + begin, NULL, end - begin, temperature, row->whole.largest};
        atomic_fetch_add_explicit(&row->state->weight, hc_measure(&its, hc_all_places, 1).weight, memory_order_relaxed);
    }
}

/* The smallest value that min_p leaves. */
static float least_of(const hc_choose_op *op, uint64_t at, float largest) {
    double exact = (double)largest + op->min_logs[at];
    float least = (float)exact;
    return (double)least < exact ? nextafterf(least, INFINITY) : least;
}

/* Whether what filters leave is listed. */
static int lists_enough(const hc_choose_op *op, uint64_t at, const hc_filtered_row *row, const hc_view *list) {
    if (row->state->listed > HC_LISTED)
        return 0;
    if (row->state->floor == -INFINITY || op->top_k[at] || least_of(op, at, list->largest) >= row->state->floor)
        return 1;
    double most = op->top_p[at] * (double)row->state->weight;
    return has_nucleus(op, at) && (double)hc_measure(list, hc_all_places, 1).weight >= most;
}

/* Nobody looks for the end of a nucleus: a best that is behind it ends what is left, and the best before it comes next. The
 * first one is in the nucleus as often as that is heavy. */
static hc_found best_left(const hc_choose_op *op, uint64_t at, const hc_filtered_row *row) {
    hc_view list = {row->values, row->columns, row->state->listed, 1.0f, row->whole.largest};
    const hc_view *view = lists_enough(op, at, row, &list) ? &list : &row->whole;
    hc_drawn_row drawn = drawn_row(op, at, hc_all_places);
    if (op->top_k[at] && op->top_k[at] < view->count)
        drawn.last = hc_place_of(view, op->top_k[at], op->columns);
    uint64_t weight = has_nucleus(op, at) && op->top_k[at] ? hc_measure(view, drawn.last, 1).weight : row->state->weight;
    float least = least_of(op, at, view->largest);
    if (least > drawn.last.value)
        drawn.last = (hc_place){least, INT32_MAX};
    for (;;) {
        hc_found best = view == &list ? best_listed(&drawn, view) : first_best_draw(&drawn, 0, op->columns);
        hc_place before = {drawn.x[best.column] / drawn.temperature, (int32_t)best.column - 1};
        if (!has_nucleus(op, at) || (double)hc_measure(view, before, 1).weight < op->top_p[at] * (double)weight)
            return best;
        drawn.last = before;
    }
}

/* Finds for filtered rows what is needed of them; all members come here. */
static void prepare_filters(const hc_choose_op *op, hc_crew *crew, uint64_t member) {
    uint64_t rows = op->op.rows, groups = (op->columns + HC_GROUP_COLUMNS - 1) / HC_GROUP_COLUMNS, begin, end;
    hc_share_of(rows, crew->size, member, &begin, &end);
    for (uint64_t at = begin; at < end; at++) {
        hc_filtered_row row = filtered_row(op, at, crew->size);
        if (is_filtered(op, at) && is_drawable(&row)) {
            row.state->weight = 0;
            row.state->listed = 0;
            find_floor(op, at, &row);
        }
    }
    hc_meet(crew);
    hc_share_of(groups, crew->size, member, &begin, &end);
    begin *= HC_GROUP_COLUMNS, end = end == groups ? op->columns : end * HC_GROUP_COLUMNS;
    for (uint64_t at = 0; at < rows; at++) {
        hc_filtered_row row = filtered_row(op, at, crew->size);
        if (is_filtered(op, at) && is_drawable(&row))
            list_and_weigh(op, at, &row, begin, end);
    }
    hc_meet(crew);
}

void HC_NAME(choose)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_choose_op *op = (const hc_choose_op *)header;
    uint64_t rows = header->rows, groups = (op->columns + HC_GROUP_COLUMNS - 1) / HC_GROUP_COLUMNS, begin, end;
    hc_found *found = op->scratch; /* [members, rows] */
    int has_filters = 0;
    for (uint64_t row = 0; row < rows; row++) {
        hc_share_of(op->columns, crew->size, member, &begin, &end);
        found[member * rows + row] = best_of(op, row, begin, end);
        if (is_filtered(op, row)) {
            has_filters = 1;
            hc_share_of(groups, crew->size, member, &begin, &end);
            float *strips = strips_of(state_of(op, row, crew->size)) + begin * HC_LANES;
            uint64_t last = end == groups ? op->columns : end * HC_GROUP_COLUMNS;
            keep_strips(op->x + row * op->columns, begin * HC_GROUP_COLUMNS, last, strips);
        }
    }
    hc_meet(crew);
    if (has_filters)
        prepare_filters(op, crew, member);
    hc_share_of(rows, crew->size, member, &begin, &end);
    for (uint64_t row = begin; row < end; row++) {
        hc_found best = best_found(op, row, crew->size);
        if (is_filtered(op, row)) {
            hc_filtered_row filtered = filtered_row(op, row, crew->size);
            best = is_drawable(&filtered) ? best_left(op, row, &filtered) : (hc_found){filtered.whole.largest, best.column};
        }
        for (uint64_t shard = 0; shard < op->shards; shard++)
            memset(op->best + 2 * (shard * rows + row), 0, 2 * sizeof *op->best);
        float *place = op->best + 2 * (op->shard * rows + row);
        place[0] = best.score;
        place[1] = (float)(op->first + best.column);
    }
}
