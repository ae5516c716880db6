/* y = x · Wᵀ + bias for weights that are whole numbers, by tiles (amx.h), where there are many rows; and what a gated MLP makes
 * of it.
 *
 * Sums of a group are exact, and groups' sums are scaled and added as linear_ints.c does: a row's bits are the same. A panel
 * is spread to signed bytes once for all rows: then no zero is to be taken off. While a group's products are made, the sums
 * of the one before are scaled. */
#include "amx.h"
#include "gated_tiles.h"
#include "linear.h"
#include "quantize.h"
#include "small_floats.h"
#include "tiles.h"

extern hc_kernel HC_NAME(linear_int_tiles), HC_NAME(gated_int_tiles);

#define GROUP HC_X_GROUP
#define QUADS (GROUP / 4) /* rows of a tile of weights */
#define ROW_BYTES (4 * HC_PANEL)
#define CACHED_BYTES (512u * 1024) /* of x that meet panel after panel */

#define SUM_0 0
#define SUM_1 1
#define X 2
#define W_0 3
#define W_1 4

/* A tile's rows, and a panel as signed bytes. */
typedef struct {
    const int8_t *w;
    const uint16_t *scales, *minima;
    const hc_weight *weight;
    hc_quantized x;
} hc_piece;

typedef int32_t hc_dots[HC_TILE_ROWS][HC_PANEL];
typedef float hc_sums[HC_TILE_ROWS][HC_PANEL];

V_INLINE void dot_group(const hc_piece *piece, uint64_t group, hc_dots dots, hc_amx *amx) {
    (void)amx;
    const int8_t *w = piece->w + group * QUADS * ROW_BYTES;
    const int8_t *x = piece->x.q + group * GROUP / HC_X_UNIT * HC_TILE_ROWS * HC_X_UNIT + group * GROUP % HC_X_UNIT;
    HC_AMX_ZERO(amx, SUM_0);
    HC_AMX_ZERO(amx, SUM_1);
    HC_AMX_LOAD(amx, X, x, HC_X_UNIT);
    HC_AMX_LOAD(amx, W_0, w, ROW_BYTES);
    HC_AMX_LOAD(amx, W_1, w + HC_TILE_BYTES, ROW_BYTES);
    HC_AMX_DOT_BYTES(amx, SUM_0, X, W_0);
    HC_AMX_DOT_BYTES(amx, SUM_1, X, W_1);
    HC_AMX_STORE(amx, SUM_0, dots[0], sizeof *dots);
    HC_AMX_STORE(amx, SUM_1, dots[0] + HC_LANES, sizeof *dots);
}

V_INLINE void scale_group(const hc_piece *piece, uint64_t group, const hc_dots dots, const int is_by_row,
                           const int has_minima, hc_sums sums) {
    const hc_weight *weight = piece->weight;
    uint64_t at = weight->group ? group * GROUP / weight->group * HC_PANEL : 0;
    const float *x_scales = piece->x.scales + group * HC_TILE_ROWS, *x_sums = piece->x.sums + group * HC_TILE_ROWS;
    vf scales[HC_VECTORS], minima[HC_VECTORS];
    HC_UNROLLED
    for (int v = 0; v < HC_VECTORS; v++) {
        scales[v] = is_by_row ? v_all(0) : v_load_as(piece->scales + at + v * HC_W, HC_F16);
        minima[v] = has_minima ? v_load_as(piece->minima + at + v * HC_W, HC_F16) : v_all(0);
    }
    for (int r = 0; r < HC_TILE_ROWS; r++) {
        vf scale = v_all(x_scales[r]), of_minima = has_minima ? v_all(x_sums[r]) : v_all(0);
        HC_UNROLLED
        for (int v = 0; v < HC_VECTORS; v++) {
            float *to = sums[r] + v * HC_W;
            vi whole;
            memcpy(&whole, dots[r] + v * HC_W, sizeof whole);
            vf sum = v_fma(__builtin_convertvector(whole, vf), is_by_row ? scale : scale * scales[v], v_load(to));
            v_store(to, has_minima ? v_fma(of_minima, minima[v], sum) : sum);
        }
    }
}

V_INLINE void multiply(const int is_by_row, const int has_minima, const hc_piece *piece, hc_sums sums, hc_amx *amx) {
    _Alignas(64) hc_dots dots[2];
    uint64_t groups = hc_x_groups(piece->weight);
    memset(sums, 0, sizeof(hc_sums));
    for (uint64_t group = 0; group < groups; group++) {
        dot_group(piece, group, dots[group % 2], amx);
        if (group)
            scale_group(piece, group - 1, dots[(group - 1) % 2], is_by_row, has_minima, sums);
    }
    scale_group(piece, groups - 1, dots[(groups - 1) % 2], is_by_row, has_minima, sums);
    if (is_by_row)
        for (int r = 0; r < HC_TILE_ROWS; r++)
            for (int v = 0; v < HC_VECTORS; v++) {
                float *to = sums[r] + v * HC_W;
                v_store(to, v_load(to) * v_load_as(piece->scales + v * HC_W, HC_F16));
            }
}

static void multiply_piece(const hc_piece *piece, hc_sums sums, hc_amx *amx) {
    if (piece->minima)
        multiply(0, 1, piece, sums, amx);
    else if (piece->weight->format == HC_I8 && !piece->weight->group)
        multiply(1, 0, piece, sums, amx);
    else
        multiply(0, 0, piece, sums, amx);
}

/* A panel's values as signed bytes, [input / 4][32][4]; zeros up to a multiple of HC_X_UNIT inputs. */
static void spread(const hc_weight *weight, uint64_t panel, uint8_t *out) {
    const uint8_t *stored = hc_panel(weight, panel);
    uint64_t inputs = hc_stored_inputs(weight), unit = hc_has_nibbles(weight) ? 8 : 4;
    uint8_t zero = hc_stored_zero(weight);
    int are_floats = weight->format == HC_F4;
    for (uint64_t i = 0; i < inputs; i += unit, out += unit * HC_PANEL)
        for (uint64_t v = 0; v < ROW_BYTES; v += sizeof(vb), stored += sizeof(vb)) {
            vb values = v_load_bytes(stored), low = values, high;
            if (unit == 8) {
                low = v_low_values(values, are_floats);
                high = v_high_values(values, are_floats) - zero;
                memcpy(out + ROW_BYTES + v, &high, sizeof high);
            }
            low -= zero;
            memcpy(out + v, &low, sizeof low);
        }
    memset(out, 0, (hc_round_up(weight->in, HC_X_UNIT) - inputs) * HC_PANEL);
}

/* A panel that is spread, and its scales. */
static hc_piece piece_of(const hc_weight *weight, uint64_t panel, uint8_t *buffer) {
    spread(weight, panel, buffer);
    return (hc_piece){.w = (const int8_t *)buffer, .weight = weight, .scales = hc_panel_numbers(weight, weight->scales, panel),
                      .minima = weight->minima ? hc_panel_numbers(weight, weight->minima, panel) : NULL};
}

/* Tiles of rows [first, behind) with the panels of a part. */
static void multiply_rows(const hc_linear_op *op, const hc_gated_op *gated, const hc_part *part, uint64_t first,
                          uint64_t behind, uint8_t *buffer, hc_amx *amx) {
    const hc_weight *weight = op->weight;
    hc_linear_op result = hc_result_of(op, gated);
    uint64_t tile_bytes = HC_TILE_ROWS * hc_row_bytes(weight), sides = hc_sides(gated);
    _Alignas(64) hc_sums sums[2];
    for (uint64_t panel = part->first_panel; panel < part->behind_panels; panel++) {
        hc_piece pieces[2];
        for (uint64_t side = 0; side < sides; side++)
            pieces[side] = piece_of(weight, panel + side * (hc_panels(weight) / sides), buffer + side * hc_panel_spread(weight));
        hc_amx_wrote();
        for (uint64_t tile = first; tile < behind; tile++) {
            hc_corner corner = hc_corner_of(&result, NULL, tile * HC_TILE_ROWS, panel * HC_PANEL);
            hc_ask_for_corner(&corner, HC_TILE_ROWS, HC_PANEL);
            for (uint64_t side = 0; side < sides; side++) {
                pieces[side].x = hc_quantized_at(weight, (char *)op->scratch + tile * tile_bytes, HC_TILE_ROWS);
                multiply_piece(&pieces[side], sums[side], amx);
            }
            if (gated)
                hc_write_gated(op, gated, &corner, HC_TILE_ROWS, sums[0][0], sums[1][0]);
            else
                hc_write_tile(&corner, HC_TILE_ROWS, HC_PANEL, sums[0][0], 1, 1);
        }
    }
}

static void multiply_part(const hc_linear_op *op, const hc_gated_op *gated, hc_crew *crew, uint64_t member) {
    const hc_weight *weight = op->weight;
    uint64_t tile_bytes = HC_TILE_ROWS * hc_row_bytes(weight), num_tiles = hc_tile_rows(op->op.rows) / HC_TILE_ROWS;
    uint64_t begin, end, at_once = CACHED_BYTES / tile_bytes;
    at_once = at_once ? at_once : 1;
    hc_share_of(num_tiles * HC_TILE_ROWS, crew->size, member, &begin, &end);
    for (uint64_t row = begin; row < end; row++) {
        hc_quantized x = hc_quantized_at(weight, (char *)op->scratch + row / HC_TILE_ROWS * tile_bytes, HC_TILE_ROWS);
        hc_quantize_row(op, row, row % HC_TILE_ROWS, HC_TILE_ROWS, &x);
    }
    hc_meet(crew);
    hc_part part = hc_part_of(num_tiles, hc_panels(weight) / hc_sides(gated), crew->size, member);
    uint8_t *buffer = (uint8_t *)op->scratch + num_tiles * tile_bytes + member * hc_spread_bytes(op);
    hc_amx amx;
    const uint8_t rows[8] = {HC_TILE_ROWS, HC_TILE_ROWS, HC_TILE_ROWS, QUADS, QUADS, 1, 1, 1};
    hc_amx_open(&amx, rows, (const uint8_t[8]){64, 64, GROUP, 64, 64, 64, 64, 64});
    for (uint64_t first = part.first_tile; first < part.behind_tiles; first += at_once) {
        uint64_t behind = first + at_once < part.behind_tiles ? first + at_once : part.behind_tiles;
        multiply_rows(op, gated, &part, first, behind, buffer, &amx);
    }
    hc_amx_close(&amx);
}

void HC_NAME(linear_int_tiles)(const hc_op *any, hc_crew *crew, uint64_t member) {
    multiply_part((const hc_linear_op *)any, NULL, crew, member);
}

void HC_NAME(gated_int_tiles)(const hc_op *any, hc_crew *crew, uint64_t member) {
    const hc_gated_op *gated = (const hc_gated_op *)any;
    multiply_part(gated->product, gated, crew, member);
}
