/* The first largest number of each row, as argmax has it: what is no number counts as the largest of all. Members share
 * the columns of every row, for a step may have one row only. */
#include "choosing.h"
#include "vectors.h"

extern hc_kernel HC_NAME(choose);

#define NONE UINT32_MAX /* the column of a share without columns */

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
        int32_t any = 0;
        for (int lane = 0; lane < HC_W; lane++)
            any |= nans[lane];
        if (any)
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

void HC_NAME(choose)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_choose_op *op = (const hc_choose_op *)header;
    uint64_t rows = header->rows, begin, end;
    hc_found *found = op->scratch; /* [members, rows] */
    hc_share_of(op->columns, crew->size, member, &begin, &end);
    for (uint64_t row = 0; row < rows; row++)
        found[member * rows + row] =
            begin < end ? first_largest(op->x + row * op->columns, begin, end) : (hc_found){0.0f, NONE};
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
