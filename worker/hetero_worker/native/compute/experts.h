/* What experts take for scratch; for the kernel and what is compiled once. */
#ifndef HETERO_EXPERTS_H
#define HETERO_EXPERTS_H

#include "linear.h"
#include "low_rank.h"

#define HC_CHOICES 4096u    /* of rows that are computed at a time, at most; one row's at least */
#define HC_EXPERT_ROWS 64u  /* that a member prepares at a time */
#define HC_LEAST_GROUP 16u  /* inputs */

/* What an expert computes for some rows. */
typedef struct {
    const hc_expert *expert;
    const uint32_t *from; /* numbers of the rows; NULL: all, in order */
    uint64_t rows;
    char *gate_up; /* [rows, 2 * columns] */
    char *gated;   /* [rows, columns] */
    float *y;      /* [rows, width] */
} hc_job;

/* Bytes of scratch that all members share, as offsets. */
typedef struct {
    uint64_t rows; /* at a time */
    uint64_t jobs, starts, from, places, gate_up, gated, y;
    uint64_t bytes;
} hc_experts_room;

static inline hc_experts_room hc_experts_room_of(const hc_experts_op *op) {
    uint64_t most = op->per_token < HC_CHOICES ? HC_CHOICES / op->per_token : 1, width = op->type == HC_F32 ? 4 : 2;
    hc_experts_room room = {.rows = op->op.rows < most ? op->op.rows : most};
    uint64_t choices = room.rows * op->per_token, shared = op->shared_columns ? room.rows : 0;
    uint64_t elements = choices * op->columns + shared * op->shared_columns;
    room.starts = hc_round_up((op->experts + 2) * sizeof(hc_job), 64); /* all experts, the shared one, and an end */
    room.from = room.starts + hc_round_up((op->experts + 1) * sizeof(uint32_t), 64);
    room.places = room.from + hc_round_up(choices * sizeof(uint32_t), 64);
    room.gate_up = room.places + hc_round_up(choices * sizeof(uint32_t), 64);
    room.gated = room.gate_up + hc_round_up(2 * elements * width, 64);
    room.y = room.gated + hc_round_up(elements * width, 64);
    room.bytes = room.y + hc_round_up((choices + shared) * op->width * sizeof(float), 64);
    return room;
}

/* Of an expert at a time; a row may choose it more than once. */
static inline uint64_t hc_prepared_rows(const hc_experts_op *op) {
    uint64_t most = op->op.rows * (op->per_token ? op->per_token : 1);
    return most < HC_EXPERT_ROWS ? most : HC_EXPERT_ROWS;
}

/* Bytes of rows that a member brings together. */
static inline uint64_t hc_gathered_bytes(const hc_experts_op *op) {
    return hc_round_up(hc_prepared_rows(op) * op->width * (op->type == HC_F32 ? 4 : 2), 64);
}

/* What a product of this shape takes, whatever its weight's format: experts change while an operation is kept. Small groups
 * have the most scales, and larger ones are what tiles multiply. */
static inline uint64_t hc_product_bytes(const hc_experts_op *op, uint64_t out, uint64_t in, uint64_t y_type) {
    static const uint64_t groups[] = {HC_LEAST_GROUP, HC_X_GROUP};
    uint64_t most = 0;
    for (uint64_t i = 0; i < 2 * HC_FORMATS; i++) {
        hc_weight weight = {.format = i / 2, .out = out, .in = in, .group = groups[i % 2]};
        hc_linear_op one = {
            .op = {HC_LINEAR, hc_prepared_rows(op)}, .weight = &weight, .type = op->type, .y_type = y_type};
        uint64_t bytes = hc_linear_scratch(&one, 1);
        most = bytes > most ? bytes : most;
    }
    return hc_round_up(most, 64);
}

static inline uint64_t hc_experts_member_bytes(const hc_experts_op *op) {
    uint64_t columns = op->columns > op->shared_columns ? op->columns : op->shared_columns;
    uint64_t first = hc_product_bytes(op, 2 * columns, op->width, op->type);
    uint64_t second = hc_product_bytes(op, op->width, columns, HC_F32);
    uint64_t most = first > second ? first : second, adapted = hc_low_rank_bytes(&(hc_low_rank_op){.op.rows = 1, .parts = 2});
    return hc_gathered_bytes(op) + (most > adapted ? most : adapted);
}

#endif
