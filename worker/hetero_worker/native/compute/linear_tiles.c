/* y = x · Wᵀ + bias for bfloat16 weights, by tiles (tile_products.h), whatever the number of rows; and what a gated MLP makes of
 * it, of a panel of gates and one of ups at a time.
 *
 * As much of the rows as stays in cache meets panel after panel. Where that is not all inputs of enough rows, to read the
 * weights seldom, it is a block of inputs, and sums of some panels are kept between one block and the next. */
#include "gated_tiles.h"
#include "linear.h"
#include "tile_products.h"

extern hc_kernel HC_NAME(linear_tiles), HC_NAME(gated_tiles);

#define X_BYTES (512u * 1024) /* of x that stay in the second cache, and meet panel after panel */

/* Rows of x as tiles read them. */
typedef struct {
    const hc_linear_op *op;
    const hc_gated_op *gated; /* what becomes of its y; or NULL */
    hc_linear_op result;
    char *x;
    uint64_t count;    /* of rows, as they are put together: up to one tile's, or full tiles */
    uint64_t terms;
    uint64_t steps;    /* of HC_PAIRED_INPUTS inputs */
    uint64_t of_tile;  /* bytes */
} hc_rows;

static hc_rows rows_of(const hc_linear_op *op, const hc_gated_op *gated) {
    hc_rows rows = {.op = op, .gated = gated, .result = hc_result_of(op, gated), .count = hc_tile_rows(op->op.rows), .terms = hc_terms(op->type)};
    rows.steps = hc_stored_inputs(op->weight) / HC_PAIRED_INPUTS;
    rows.of_tile = rows.steps * rows.terms * HC_TERM_BYTES;
    return rows;
}

V_INLINE void put_row(const hc_rows *rows, uint64_t row, const uint64_t type) {
    const hc_linear_op *op = rows->op;
    const void *x = row < op->op.rows ? hc_at(op->x, row * op->x_stride, type) : NULL;
    char *to = rows->x + row / HC_TILE_ROWS * rows->of_tile + row % HC_TILE_ROWS * HC_TILE_BYTES;
    hc_put_row(x, op->weight->in, rows->steps, type, to);
}

static void put_rows(const hc_rows *rows, uint64_t begin, uint64_t end) {
    for (uint64_t row = begin; row < end; row++) {
        if (rows->op->type == HC_F32)
            put_row(rows, row, HC_F32);
        else
            put_row(rows, row, HC_BF16);
    }
}

/* Panels, or pairs of them. */
static uint64_t panels_of(const hc_rows *rows) { return hc_panels(rows->op->weight) / hc_sides(rows->gated); }

static uint64_t tiles_at(const hc_rows *rows, uint64_t row) { return rows->count - row > HC_TILE_ROWS ? 2 : 1; }

/* `sums`: of rows of up to two tiles and a panel, or one of gates and then its ups. */
static void write_sums(const hc_rows *rows, const hc_corner *corner, const float *sums) {
    uint64_t most = tiles_at(rows, corner->row) * HC_TILE_ROWS;
    if (rows->gated)
        hc_write_gated(rows->op, rows->gated, corner, most, sums, sums + HC_HIGH_ROWS * HC_PANEL);
    else
        hc_write_tile(corner, most, HC_PANEL, sums, 1, 1);
}

/* What is gone through at a time: rows that are multiplied at once, inputs, panels. */
typedef struct {
    uint64_t high, steps, panels;
} hc_batch;

static hc_batch batch_of(const hc_rows *rows, const hc_part *part) {
    uint64_t step_bytes = 2 * rows->terms * HC_TERM_BYTES, all = part->behind_tiles - part->first_tile;
    uint64_t most = X_BYTES / (step_bytes * rows->steps), enough = rows->terms == 1 ? 8 : 4;
    most = most ? most : 1;
    if (all <= most || most >= enough) { /* all inputs at a time, of rows as even as can be */
        uint64_t parts = (all + most - 1) / most;
        return (hc_batch){(all + parts - 1) / parts, rows->steps, UINT64_MAX};
    }
    uint64_t high = all < enough ? all : enough, steps = X_BYTES / (step_bytes * high);
    return (hc_batch){high, steps, HC_KEPT_SUMS / (high * hc_sides(rows->gated))};
}

/* Rows and panels of a batch, block by block of inputs. */
static void multiply_batch(const hc_rows *rows, const hc_part *part, const hc_batch *batch, float *kept, hc_amx *amx) {
    const hc_weight *weight = rows->op->weight;
    uint64_t high = part->behind_tiles - part->first_tile, sides = hc_sides(rows->gated), of_side = HC_HIGH_ROWS * HC_PANEL;
    hc_stream stream = hc_stream_of(hc_panel(weight, hc_panels(weight)), HC_STEP_BYTES, 1, high, hc_panel_bytes(weight), 0);
    _Alignas(64) float sums[2 * HC_HIGH_ROWS * HC_PANEL];
    hc_product piece = {.of_tile = rows->of_tile, .sums_stride = HC_PANEL * sizeof(float)};
    for (uint64_t step = 0; step < rows->steps; step += batch->steps) {
        piece.steps = rows->steps - step < batch->steps ? rows->steps - step : batch->steps;
        int is_last = step + piece.steps == rows->steps;
        for (uint64_t panel = part->first_panel; panel < part->behind_panels; panel++)
            for (uint64_t i = 0; i < high; i++) {
                uint64_t first = part->first_tile + i, tiles = tiles_at(rows, first * HC_HIGH_ROWS);
                float *of_corner = batch->steps < rows->steps ? kept + ((panel - part->first_panel) * high + i) * sides * of_side : sums;
                hc_corner corner = hc_corner_of(&rows->result, NULL, first * HC_HIGH_ROWS, panel * HC_PANEL);
                if (is_last)
                    hc_ask_for_corner(&corner, tiles * HC_TILE_ROWS, HC_PANEL);
                piece.x = rows->x + 2 * first * rows->of_tile + step * rows->terms * HC_TERM_BYTES;
                for (uint64_t side = 0; side < sides; side++) {
                    piece.w = (const char *)hc_panel(weight, panel + side * panels_of(rows)) + step * HC_STEP_BYTES;
                    piece.ahead = hc_ahead_of(&stream, piece.w, i);
                    piece.sums = of_corner + side * of_side;
                    hc_multiply_tiles(tiles, rows->terms, !step, &piece, amx);
                }
                if (is_last)
                    write_sums(rows, &corner, of_corner);
            }
    }
}

static void multiply_part(const hc_rows *rows, const hc_part *part, float *kept, hc_amx *amx) {
    hc_batch batch = batch_of(rows, part);
    hc_part some;
    for (some.first_tile = part->first_tile; some.first_tile < part->behind_tiles; some.first_tile = some.behind_tiles) {
        uint64_t left = part->behind_tiles - some.first_tile;
        some.behind_tiles = some.first_tile + (left < batch.high ? left : batch.high);
        for (some.first_panel = part->first_panel; some.first_panel < part->behind_panels;
             some.first_panel = some.behind_panels) {
            left = part->behind_panels - some.first_panel;
            some.behind_panels = some.first_panel + (left < batch.panels ? left : batch.panels);
            multiply_batch(rows, &some, &batch, kept, amx);
        }
    }
}

static void multiply(const hc_linear_op *op, const hc_gated_op *gated, hc_crew *crew, uint64_t member) {
    hc_rows rows = rows_of(op, gated);
    uint64_t num_high = (rows.count + HC_HIGH_ROWS - 1) / HC_HIGH_ROWS, begin = 0, end = rows.count;
    hc_part part = hc_part_of(num_high, panels_of(&rows), crew->size, member);
    rows.x = op->scratch;
    if (op->op.rows > HC_FEW_ROWS) {
        hc_share_of(rows.count, crew->size, member, &begin, &end);
        put_rows(&rows, begin, end);
        hc_meet(crew);
    } else {
        rows.x += member * hc_tile_rows_bytes(op);
        put_rows(&rows, begin, end);
    }
    if (part.first_tile == part.behind_tiles || part.first_panel == part.behind_panels)
        return;
    hc_amx amx;
    hc_open_tiles(&amx, rows.count);
    multiply_part(&rows, &part, (float *)(rows.x + hc_tile_rows_bytes(op) + member * hc_kept_bytes(op)), &amx);
    hc_amx_close(&amx);
}

void HC_NAME(linear_tiles)(const hc_op *any, hc_crew *crew, uint64_t member) {
    multiply((const hc_linear_op *)any, NULL, crew, member);
}

void HC_NAME(gated_tiles)(const hc_op *any, hc_crew *crew, uint64_t member) {
    const hc_gated_op *gated = (const hc_gated_op *)any;
    multiply(gated->product, gated, crew, member);
}
