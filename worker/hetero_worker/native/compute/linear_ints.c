/* y = x · Wᵀ + bias for weights that are whole numbers: x is made so, too, group by group; products are summed exactly
 * within a group, and groups' sums, scaled, in their order. The same for one row and for many.
 *
 * Where there are several tiles of rows, 4-bit weights are spread to bytes once for all of them. */
#include "linear.h"
#include "quantize.h"
#include "tiles.h"

/* Rows and panels at once: a tile of TILE rows with PANELS, or of up to HIGH_TILE with one. The high one reads each weight
 * once for more rows, the other each number of x for more panels. */
#if defined(__AVX512F__)
#define TILE 6
#define PANELS 2
#define HIGH_TILE 12
#else
#define TILE 2
#define PANELS 1
#define HIGH_TILE 2
#endif
#define ONE_ROW_PANELS HC_MAX_PANELS
#define HIGH_TILES 2 /* up to so many are high, and spread nothing */
#define CACHED_BYTES (384u * 1024) /* of x that are gone through for panel after panel */
#define AHEAD_BYTES (256u * 1024)  /* of panels that are asked for while those before are computed with, at most */

enum { BYTES, NIBBLES, SPREAD_NIBBLES }; /* the last: one a byte */

typedef struct {
    const uint8_t *values[HC_MAX_PANELS];
    const uint16_t *scales[HC_MAX_PANELS];
    const uint16_t *minima[HC_MAX_PANELS];
    const hc_weight *weight;
    hc_quantized x;
    hc_next next;
    uint64_t next_step; /* bytes for a group of x */
    hc_corner corner;
} hc_piece;

/* sums += dot products of `count` inputs, a multiple of 4 (of NIBBLES: of 8). */
HC_INLINE void add_dots(const int rows, const int panels, const int kind, const uint8_t *const *w, const int8_t *x,
                        uint64_t count, i32x16 (*sums)[HC_MAX_PANELS]) {
    const uint64_t inputs = kind == NIBBLES ? 8 : 4;
    uint64_t at = 0;
    for (const int8_t *end = x + count; x < end; x += inputs, at += 64) {
        u8x64 v[HC_MAX_PANELS];
        HC_UNROLLED
        for (int p = 0; p < panels; p++)
            v[p] = hc_load_bytes(w[p] + at);
        HC_UNROLLED
        for (int r = 0; r < rows; r++)
            HC_UNROLLED
            for (int p = 0; p < panels; p++)
                sums[r][p] = hc_dot(sums[r][p], kind == NIBBLES ? hc_low_nibbles(v[p]) : v[p], x + r * HC_X_UNIT,
                                    kind != BYTES);
        if (kind != NIBBLES)
            continue;
        HC_UNROLLED
        for (int r = 0; r < rows; r++)
            HC_UNROLLED
            for (int p = 0; p < panels; p++)
                sums[r][p] = hc_dot(sums[r][p], hc_high_nibbles(v[p]), x + r * HC_X_UNIT + 4, 1);
    }
}

HC_INLINE void multiply(const int rows, const int panels, const int kind, const int is_by_row, const int has_minima,
                        const hc_piece *piece) {
    const hc_weight *weight = piece->weight;
    uint64_t in = hc_stored_inputs(weight), group = hc_x_group(weight);
    uint64_t next_scale = weight->group ? weight->group : UINT64_MAX; /* the input from which on there is another one */
    hc_quantized x = piece->x;
    const uint8_t *w[HC_MAX_PANELS];
    f32x16 sums[HC_MAX_TILE][HC_MAX_PANELS];
    for (int p = 0; p < panels; p++)
        w[p] = piece->values[p];
    HC_UNROLLED
    for (int r = 0; r < rows; r++)
        HC_UNROLLED
        for (int p = 0; p < panels; p++)
            sums[r][p] = hc_all(0);
    for (uint64_t begin = 0, asked = 0, at = 0; begin < in;) {
        uint64_t count = in - begin < group ? in - begin : group;
        hc_ask_for(&piece->next, panels, asked);
        asked += piece->next_step;
        i32x16 dots[HC_MAX_TILE][HC_MAX_PANELS];
        HC_UNROLLED
        for (int r = 0; r < rows; r++)
            HC_UNROLLED
            for (int p = 0; p < panels; p++)
                dots[r][p] = hc_all_ints(x.starts[r]);
        add_dots(rows, panels, kind, w, x.q, count, dots);
        if (begin == next_scale) {
            next_scale += weight->group;
            at += HC_PANEL;
        }
        f32x16 scales[HC_MAX_PANELS], minima[HC_MAX_PANELS];
        HC_UNROLLED
        for (int p = 0; p < panels; p++) {
            scales[p] = is_by_row ? hc_all(0) : hc_widen_f16(piece->scales[p] + at);
            minima[p] = has_minima ? hc_widen_f16(piece->minima[p] + at) : hc_all(0);
        }
        HC_UNROLLED
        for (int r = 0; r < rows; r++) {
            f32x16 scale = hc_all(x.scales[r]), sum = hc_all(x.sums[r]);
            HC_UNROLLED
            for (int p = 0; p < panels; p++) {
                f32x16 dot = __builtin_convertvector(dots[r][p], f32x16);
                sums[r][p] = hc_fma(dot, is_by_row ? scale : hc_product(scale, scales[p]), sums[r][p]);
                if (has_minima)
                    sums[r][p] = hc_fma(sum, minima[p], sums[r][p]);
            }
        }
        for (int p = 0; p < panels; p++)
            w[p] += group * HC_PANEL / (kind == NIBBLES ? 2 : 1);
        x.starts += rows;
        x.scales += rows;
        x.sums += rows;
        x.q += group;
        begin += group;
        if (begin % HC_X_UNIT == 0)
            x.q += (rows - 1) * HC_X_UNIT;
    }
    f32x16 out[HC_MAX_TILE * HC_MAX_PANELS];
    HC_UNROLLED
    for (int r = 0; r < rows; r++)
        HC_UNROLLED
        for (int p = 0; p < panels; p++)
            out[r * panels + p] = is_by_row ? sums[r][p] * hc_widen_f16(piece->scales[p]) : sums[r][p];
    hc_write_tile(&piece->corner, (uint64_t)rows, (uint64_t)panels, out, 1, 1);
}

#define ROWS_CASE(n, most)                                                                                             \
    case n:                                                                                                            \
        if (n <= most)                                                                                                 \
            multiply(n <= most ? n : 1, panels, kind, is_by_row, has_minima, piece);                                   \
        return;

HC_INLINE void multiply_rows(uint64_t rows, const int panels, const int kind, const int is_by_row, const int has_minima,
                             const hc_piece *piece) {
    switch (rows) {
        ROWS_CASE(2, TILE)
        ROWS_CASE(4, TILE)
        ROWS_CASE(6, TILE)
    }
}

HC_INLINE void multiply_high(uint64_t rows, const int panels, const int kind, const int is_by_row, const int has_minima,
                             const hc_piece *piece) {
    switch (rows) {
        ROWS_CASE(1, HIGH_TILE)
        ROWS_CASE(2, HIGH_TILE)
        ROWS_CASE(4, HIGH_TILE)
        ROWS_CASE(6, HIGH_TILE)
        ROWS_CASE(8, HIGH_TILE)
        ROWS_CASE(10, HIGH_TILE)
        ROWS_CASE(12, HIGH_TILE)
    }
}

HC_INLINE void multiply_panels(uint64_t rows, uint64_t panels, const int kind, const int is_by_row,
                               const int has_minima, const hc_piece *piece) {
    if (panels == 1)
        multiply_high(rows, 1, kind, is_by_row, has_minima, piece);
    else if (rows == 1)
        multiply(1, ONE_ROW_PANELS, kind, is_by_row, has_minima, piece);
    else
        multiply_rows(rows, PANELS, kind, is_by_row, has_minima, piece);
}

typedef void multiplier(uint64_t rows, uint64_t panels, const hc_piece *piece);

#define MULTIPLIER(name, kind, is_by_row, has_minima)                                                                  \
    static void name(uint64_t rows, uint64_t panels, const hc_piece *piece) {                                          \
        multiply_panels(rows, panels, kind, is_by_row, has_minima, piece);                                             \
    }

MULTIPLIER(multiply_bytes_by_row, BYTES, 1, 0)
MULTIPLIER(multiply_bytes, BYTES, 0, 0)
MULTIPLIER(multiply_bytes_with_minima, BYTES, 0, 1)
MULTIPLIER(multiply_nibbles, NIBBLES, 0, 0)
MULTIPLIER(multiply_nibbles_with_minima, NIBBLES, 0, 1)
MULTIPLIER(multiply_spread, SPREAD_NIBBLES, 0, 0)
MULTIPLIER(multiply_spread_with_minima, SPREAD_NIBBLES, 0, 1)

static multiplier *multiplier_of(const hc_weight *weight, int is_spread) {
    if (weight->format == HC_I8)
        return weight->minima ? multiply_bytes_with_minima : weight->group ? multiply_bytes : multiply_bytes_by_row;
    if (is_spread)
        return weight->minima ? multiply_spread_with_minima : multiply_spread;
    return weight->minima ? multiply_nibbles_with_minima : multiply_nibbles;
}

static void spread(const uint8_t *panel, uint64_t inputs, uint8_t *out) {
    for (uint64_t i = 0; i < inputs; i += 8, panel += 64, out += 128) {
        u8x64 v = hc_load_bytes(panel), low = hc_low_nibbles(v), high = hc_high_nibbles(v);
        memcpy(out, &low, sizeof low);
        memcpy(out + 64, &high, sizeof high);
    }
}

/* Rows of x as multiply wants them. */
typedef struct {
    const hc_linear_op *op;
    hc_tiles tiles;
    char *x;
    uint64_t row_bytes;
    int are_high;
} hc_rows;

static void quantize_tiles(const hc_rows *rows, uint64_t begin, uint64_t end) {
    const hc_linear_op *op = rows->op;
    for (uint64_t tile = begin; tile < end; tile++) {
        uint64_t first = hc_tile_begin(&rows->tiles, tile), count = hc_tile_begin(&rows->tiles, tile + 1) - first;
        hc_quantized out = hc_quantized_at(op->weight, rows->x + first * rows->row_bytes, count);
        for (uint64_t r = 0; r < count; r++)
            hc_quantize_row(op->weight, first + r < op->op.rows ? op->x + (first + r) * op->x_stride : NULL, r, count,
                            &out);
    }
}

static uint64_t panels_at_once(const hc_tiles *tiles) {
    uint64_t highest = hc_highest_tile(tiles);
    return highest == 1 ? ONE_ROW_PANELS : highest <= TILE ? PANELS : 1;
}

/* The part's tiles with its panels, one after another. */
static void multiply_part(const hc_rows *rows, const hc_part *part, uint8_t *buffer) {
    const hc_weight *weight = rows->op->weight;
    int is_spread = buffer && !rows->are_high;
    multiplier *run = multiplier_of(weight, is_spread);
    uint64_t at_once = panels_at_once(&rows->tiles);
    for (uint64_t panel = part->first_panel, now; panel < part->behind_panels; panel += now) {
        now = part->behind_panels - panel < at_once ? 1 : at_once;
        hc_piece piece = {.weight = weight, .next_step = hc_x_group(weight) * HC_PANEL / (weight->format == HC_I4 ? 2 : 1)};
        uint64_t after = panel + now < part->behind_panels ? panel + now : panel;
        const char *next = hc_panel(weight, now * hc_panel_bytes(weight) > AHEAD_BYTES ? panel : after);
        for (uint64_t p = 0; p < now; p++) {
            piece.values[p] = hc_panel(weight, panel + p);
            piece.scales[p] = hc_panel_numbers(weight, weight->scales, panel + p);
            piece.minima[p] = weight->minima ? hc_panel_numbers(weight, weight->minima, panel + p) : NULL;
            if (is_spread) {
                uint8_t *to = buffer + p * hc_unpacked_bytes(weight);
                spread(piece.values[p], hc_stored_inputs(weight), to);
                piece.values[p] = to;
            }
        }
        for (uint64_t tile = part->first_tile; tile < part->behind_tiles; tile++) {
            uint64_t first = hc_tile_begin(&rows->tiles, tile), count = hc_tile_begin(&rows->tiles, tile + 1) - first;
            piece.x = hc_quantized_at(weight, rows->x + first * rows->row_bytes, count);
            piece.corner = hc_corner_of(rows->op, first, panel);
            piece.next = hc_next_of(next, now, hc_panel_bytes(weight), piece.next_step, tile - part->first_tile,
                                    part->behind_tiles - part->first_tile);
            run(count, now, &piece);
        }
    }
}

extern hc_kernel HC_NAME(linear_ints);

void HC_NAME(linear_ints)(const hc_op *any, hc_crew *crew, uint64_t member) {
    const hc_linear_op *op = (const hc_linear_op *)any;
    const hc_weight *weight = op->weight;
    int are_high = op->op.rows <= HIGH_TILES * HIGH_TILE;
    hc_tiles tiles = hc_tiles_of(op->op.rows, are_high ? HIGH_TILE : TILE);
    hc_part part = hc_part_of(tiles.count, hc_panels(weight), crew->size, member);
    hc_rows rows = {op, tiles, op->scratch, hc_row_bytes(weight), are_high};
    int are_few = op->op.rows <= HC_FEW_ROWS;
    uint8_t *buffers = (uint8_t *)op->scratch + hc_rows_bytes(op) * (are_few ? crew->size : 1);
    uint64_t buffer_bytes = HC_UNPACKED_PANELS * hc_unpacked_bytes(weight);
    if (are_few) {
        rows.x += member * hc_rows_bytes(op);
        quantize_tiles(&rows, part.first_tile, part.behind_tiles);
    } else {
        uint64_t begin, end;
        hc_share_of(tiles.count, crew->size, member, &begin, &end);
        quantize_tiles(&rows, begin, end);
        hc_meet(crew);
    }
    uint64_t at_once = CACHED_BYTES / (HIGH_TILE * rows.row_bytes);
    at_once = at_once ? at_once : 1;
    for (uint64_t first = part.first_tile; first < part.behind_tiles; first += at_once) {
        hc_part some = part;
        some.first_tile = first;
        some.behind_tiles = first + at_once < part.behind_tiles ? first + at_once : part.behind_tiles;
        multiply_part(&rows, &some, buffer_bytes ? buffers + member * buffer_bytes : NULL);
    }
}
