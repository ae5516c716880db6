/* From a decode step to the next: its draws are decided, kept, and put in as the inputs that follow. That is a handful of
 * numbers a row, which one member is quicker with than all. */
#include "choosing.h"
#include "isa.h"

extern hc_kernel HC_NAME(step_on);

void HC_NAME(step_on)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_step_on_op *op = (const hc_step_on_op *)header;
    uint64_t rows = header->rows;
    (void)crew;
    if (member)
        return;
    uint64_t kept = (*op->steps)++ * rows;
    for (uint64_t draw = 0; draw < rows; draw++) {
        const float *best = op->best + 2 * draw;
        for (uint64_t shard = 1; shard < op->shards; shard++) {
            const float *its = op->best + 2 * (shard * rows + draw);
            if (hc_beats(its[0], best[0]))
                best = its;
        }
        int64_t row = op->inputs[draw], position = ++op->positions[row];
        uint64_t block = (uint64_t)position / op->block_size;
        /* A sequence that has come to its end has no block for a next token: none is computed. */
        int64_t id = block < op->table_stride ? op->tables[(uint64_t)row * op->table_stride + block] : 0;
        op->slot_mapping[row] = id * (int64_t)op->block_size + position % (int64_t)op->block_size;
        op->lengths[row]++;
        op->token_ids[row] = (int64_t)best[1];
        op->tokens[kept + draw] = (int64_t)best[1];
        op->scores[kept + draw] = best[0];
    }
}
