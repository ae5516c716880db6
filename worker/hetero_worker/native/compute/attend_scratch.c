/* What attention takes for scratch: see attend.h for what is in it. */
#include "attend.h"

uint64_t hc_attend_scratch(const hc_attend_op *op, uint64_t team_size) {
    uint64_t borders = team_size - 1, shared = borders < op->op.rows ? borders : op->op.rows;
    return (team_size * hc_decode_member_floats(&op->cache) + shared * hc_shared_row_floats(op)) * sizeof(float);
}

uint64_t hc_attend_span_scratch(const hc_attend_span_op *op, uint64_t team_size) {
    return team_size * hc_span_member_floats(op, team_size) * sizeof(float);
}
