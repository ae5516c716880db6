/* y = x · Wᵀ + bias for weights that are whole numbers: x is made so, too, group by group; products are summed exactly
 * within a group, and groups' sums, scaled, in their order. The same for one row and for many.
 *
 * Where there are several tiles of rows, 4-bit weights are spread to bytes once for all of them. */
#include "linear.h"
#include "quantize.h"
#include "small_floats.h"
#include "tiles.h"

/* Rows and vectors of a panel at once: a tile of TILE rows with VECTORS, or of up to HIGH_TILE with HIGH_VECTORS. The high
 * one reads each weight once for more rows, the other each number of x for more weights. */
#if defined(__AVX512F__)
#define TILE 6
#define VECTORS HC_VECTORS
#define HIGH_TILE 12
#define HIGH_VECTORS 1
#elif defined(__AVX2__)
#define TILE 4
#define VECTORS 2
#define HIGH_TILE TILE
#define HIGH_VECTORS VECTORS
#else
#define TILE 2
#define VECTORS 4
#define HIGH_TILE TILE
#define HIGH_VECTORS VECTORS
#endif
/* Up to so many tiles are high, and 4-bit weights need not be spread for them. */
#define HIGH_TILES(weight) (hc_has_nibbles(weight) ? 2 : 0)
/* A few rows ask for what comes later in parts of a group. More rows, and 4-bit weights, keep a core so busy that this wins
 * nothing. */
#define PARTS(weight) (hc_x_group(weight) / 4)
#define ASKS_IN_PARTS(rows, kind) ((kind) == BYTES && (rows) < TILE)
#define CACHED_BYTES (384u * 1024) /* of x that are gone through for panel after panel */
#define AHEAD_NUMBERS 512          /* bytes of scales, and of minima, that are asked for ahead */

enum { BYTES, NIBBLES, FLOAT_NIBBLES, SPREAD_NIBBLES }; /* the last: one a byte, floats looked up */
#define ARE_PACKED(kind) ((kind) == NIBBLES || (kind) == FLOAT_NIBBLES)

/* A panel, or a vector of it, and a tile's rows. */
typedef struct {
    const uint8_t *values;
    const uint16_t *scales;
    const uint16_t *minima;
    const hc_weight *weight;
    hc_quantized x;
    hc_ahead ahead;
    uint64_t ahead_step; /* bytes of a group of x, as they are stored */
    hc_corner corner;
} hc_piece;

/* sums += dot products of `count` inputs, a multiple of 4 (where two lie in a byte: of 8). */
V_INLINE void add_dots(const int rows, const int vectors, const int kind, const uint8_t *w, const int8_t *x,
                        uint64_t count, const hc_ahead *ahead, uint64_t asked, vi (*sums)[HC_VECTORS]) {
    const uint64_t inputs = ARE_PACKED(kind) ? 8 : 4;
    uint64_t part = 0;
    for (const int8_t *end = x + count; x < end; x += inputs, w += 4 * HC_PANEL) {
        if (ASKS_IN_PARTS(rows, kind))
            hc_ask_for_part(ahead, asked, part++);
        vb weights[HC_VECTORS], low[HC_VECTORS];
        HC_UNROLLED
        for (int v = 0; v < vectors; v++) {
            weights[v] = v_load_bytes(w + v * sizeof(vb));
            low[v] = ARE_PACKED(kind) ? v_low_values(weights[v], kind == FLOAT_NIBBLES) : weights[v];
        }
        HC_UNROLLED
        for (int r = 0; r < rows; r++)
            HC_UNROLLED
            for (int v = 0; v < vectors; v++)
                sums[r][v] = v_dot(sums[r][v], low[v], x + r * HC_X_UNIT, kind != BYTES);
        if (!ARE_PACKED(kind))
            continue;
        HC_UNROLLED
        for (int v = 0; v < vectors; v++)
            weights[v] = v_high_values(weights[v], kind == FLOAT_NIBBLES);
        HC_UNROLLED
        for (int r = 0; r < rows; r++)
            HC_UNROLLED
            for (int v = 0; v < vectors; v++)
                sums[r][v] = v_dot(sums[r][v], weights[v], x + r * HC_X_UNIT + 4, 1);
    }
}

#if HC_HAS_PAIRS
/* The same of small weights. */
V_INLINE void add_pairs(const int rows, const int vectors, const int kind, const uint8_t *w, const int8_t *x,
                         uint64_t count, vi (*sums)[HC_VECTORS]) {
    const uint64_t inputs = ARE_PACKED(kind) ? 8 : 4;
    for (const int8_t *end = x + count; x < end;) {
        __m256i pairs[HC_MAX_TILE][HC_VECTORS];
        HC_UNROLLED
        for (int r = 0; r < rows; r++)
            HC_UNROLLED
            for (int v = 0; v < vectors; v++)
                pairs[r][v] = _mm256_setzero_si256();
        const int8_t *behind = end - x < HC_MOST_PAIRED ? end : x + HC_MOST_PAIRED;
        for (; x < behind; x += inputs, w += 4 * HC_PANEL)
            HC_UNROLLED
            for (uint64_t half = 0; half < inputs / 4; half++) {
                vb weights[HC_VECTORS];
                HC_UNROLLED
                for (int v = 0; v < vectors; v++) {
                    weights[v] = v_load_bytes(w + v * sizeof(vb));
                    if (ARE_PACKED(kind))
                        weights[v] = half ? v_high_values(weights[v], kind == FLOAT_NIBBLES)
                                          : v_low_values(weights[v], kind == FLOAT_NIBBLES);
                }
                HC_UNROLLED
                for (int r = 0; r < rows; r++)
                    HC_UNROLLED
                    for (int v = 0; v < vectors; v++)
                        pairs[r][v] = v_add_pairs(pairs[r][v], weights[v], x + r * HC_X_UNIT + 4 * half);
            }
        HC_UNROLLED
        for (int r = 0; r < rows; r++)
            HC_UNROLLED
            for (int v = 0; v < vectors; v++)
                sums[r][v] = v_add_paired(sums[r][v], pairs[r][v]);
    }
}
#endif

V_INLINE void multiply(const int rows, const int vectors, const int kind, const int is_by_row, const int has_minima,
                        const hc_piece *piece) {
    const hc_weight *weight = piece->weight;
    uint64_t in = hc_stored_inputs(weight), group = hc_x_group(weight);
    uint64_t next_scale = weight->group ? weight->group : UINT64_MAX; /* the input from which on there is another one */
    hc_quantized x = piece->x;
    const uint8_t *w = piece->values;
    if (rows > 1)
        hc_ask_for_corner(&piece->corner, (uint64_t)rows, (uint64_t)vectors * HC_W);
    vf sums[HC_MAX_TILE][HC_VECTORS];
    HC_UNROLLED
    for (int r = 0; r < rows; r++)
        HC_UNROLLED
        for (int v = 0; v < vectors; v++)
            sums[r][v] = v_all(0);
    for (uint64_t begin = 0, asked = 0, at = 0; begin < in;) {
        uint64_t count = in - begin < group ? in - begin : group;
        if (!ASKS_IN_PARTS(rows, kind))
            hc_ask_for(&piece->ahead, asked);
        vi dots[HC_MAX_TILE][HC_VECTORS];
        HC_UNROLLED
        for (int r = 0; r < rows; r++)
            HC_UNROLLED
            for (int v = 0; v < vectors; v++)
                dots[r][v] = v_all_of(x.starts[r]);
#if HC_HAS_PAIRS
        if (kind != BYTES)
            add_pairs(rows, vectors, kind, w, x.q, count, dots);
        else
#endif
            add_dots(rows, vectors, kind, w, x.q, count, &piece->ahead, asked, dots);
        asked += piece->ahead_step;
        if (begin == next_scale) {
            next_scale += weight->group;
            at += HC_PANEL;
            __builtin_prefetch((const char *)(piece->scales + at) + AHEAD_NUMBERS);
            if (has_minima)
                __builtin_prefetch((const char *)(piece->minima + at) + AHEAD_NUMBERS);
        }
        vf scales[HC_VECTORS], minima[HC_VECTORS];
        HC_UNROLLED
        for (int v = 0; v < vectors; v++) {
            scales[v] = is_by_row ? v_all(0) : v_load_as(piece->scales + at + v * HC_W, HC_F16);
            minima[v] = has_minima ? v_load_as(piece->minima + at + v * HC_W, HC_F16) : v_all(0);
        }
        HC_UNROLLED
        for (int r = 0; r < rows; r++) {
            vf scale = v_all(x.scales[r]), sum = v_all(x.sums[r]);
            HC_UNROLLED
            for (int v = 0; v < vectors; v++) {
                vf dot = __builtin_convertvector(dots[r][v], vf);
                sums[r][v] = v_fma(dot, is_by_row ? scale : scale * scales[v], sums[r][v]);
                if (has_minima)
                    sums[r][v] = v_fma(sum, minima[v], sums[r][v]);
            }
        }
        w += group * HC_PANEL / (ARE_PACKED(kind) ? 2 : 1);
        x.starts += rows;
        x.scales += rows;
        x.sums += rows;
        x.q += group;
        begin += group;
        if (begin % HC_X_UNIT == 0)
            x.q += (rows - 1) * HC_X_UNIT;
    }
    float out[HC_MAX_TILE * HC_PANEL];
    HC_UNROLLED
    for (int r = 0; r < rows; r++)
        HC_UNROLLED
        for (int v = 0; v < vectors; v++)
            v_store(out + (r * vectors + v) * HC_W,
                    is_by_row ? sums[r][v] * v_load_as(piece->scales + v * HC_W, HC_F16) : sums[r][v]);
    hc_write_tile(&piece->corner, (uint64_t)rows, (uint64_t)vectors * HC_W, out, 1, 1);
}

#define ROWS_CASE(n, most, vectors)                                                                                    \
    case n:                                                                                                            \
        if (n <= most)                                                                                                 \
            multiply(n <= most ? n : 1, vectors, kind, is_by_row, has_minima, piece);                                  \
        return;

V_INLINE void multiply_rows(uint64_t rows, uint64_t vectors, const int kind, const int is_by_row, const int has_minima,
                             const hc_piece *piece) {
    if (rows == 1) {
        multiply(1, HC_VECTORS, kind, is_by_row, has_minima, piece);
        return;
    }
    if (vectors == VECTORS)
        switch (rows) {
            ROWS_CASE(2, TILE, VECTORS)
            ROWS_CASE(4, TILE, VECTORS)
            ROWS_CASE(6, TILE, VECTORS)
        }
#if HIGH_TILE > TILE
    if (ARE_PACKED(kind)) /* see HIGH_TILES */
        switch (rows) {
            ROWS_CASE(2, HIGH_TILE, HIGH_VECTORS)
            ROWS_CASE(4, HIGH_TILE, HIGH_VECTORS)
            ROWS_CASE(6, HIGH_TILE, HIGH_VECTORS)
            ROWS_CASE(8, HIGH_TILE, HIGH_VECTORS)
            ROWS_CASE(10, HIGH_TILE, HIGH_VECTORS)
            ROWS_CASE(12, HIGH_TILE, HIGH_VECTORS)
        }
#endif
}

typedef void multiplier(uint64_t rows, uint64_t vectors, const hc_piece *piece);

#define MULTIPLIER(name, kind, is_by_row, has_minima)                                                                  \
    static void name(uint64_t rows, uint64_t vectors, const hc_piece *piece) {                                         \
        multiply_rows(rows, vectors, kind, is_by_row, has_minima, piece);                                              \
    }

MULTIPLIER(multiply_bytes_by_row, BYTES, 1, 0)
MULTIPLIER(multiply_bytes, BYTES, 0, 0)
MULTIPLIER(multiply_bytes_with_minima, BYTES, 0, 1)
MULTIPLIER(multiply_nibbles, NIBBLES, 0, 0)
MULTIPLIER(multiply_nibbles_with_minima, NIBBLES, 0, 1)
MULTIPLIER(multiply_float_nibbles, FLOAT_NIBBLES, 0, 0)
MULTIPLIER(multiply_spread, SPREAD_NIBBLES, 0, 0)
MULTIPLIER(multiply_spread_with_minima, SPREAD_NIBBLES, 0, 1)

static multiplier *multiplier_of(const hc_weight *weight, int is_spread) {
    if (weight->format == HC_I8)
        return weight->minima ? multiply_bytes_with_minima : weight->group ? multiply_bytes : multiply_bytes_by_row;
    if (is_spread)
        return weight->minima ? multiply_spread_with_minima : multiply_spread;
    if (weight->format == HC_F4)
        return multiply_float_nibbles;
    return weight->minima ? multiply_nibbles_with_minima : multiply_nibbles;
}

static void spread(const uint8_t *panel, uint64_t inputs, int are_floats, uint8_t *out) {
    for (uint64_t i = 0; i < inputs; i += 8, out += 4 * HC_PANEL)
        for (uint64_t v = 0; v < 4 * HC_PANEL; v += sizeof(vb), panel += sizeof(vb), out += sizeof(vb)) {
            vb weights = v_load_bytes(panel), low = v_low_values(weights, are_floats), high = v_high_values(weights, are_floats);
            memcpy(out, &low, sizeof low);
            memcpy(out + 4 * HC_PANEL, &high, sizeof high);
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
            hc_quantize_row(op, first + r, r, count, &out);
    }
}

static uint64_t vectors_at_once(const hc_tiles *tiles) {
    uint64_t highest = hc_highest_tile(tiles);
    return highest == 1 ? HC_VECTORS : highest <= TILE ? VECTORS : HIGH_VECTORS;
}

/* The part's tiles with its panels, one after another. */
static void multiply_part(const hc_rows *rows, const hc_part *part, uint8_t *buffer) {
    const hc_weight *weight = rows->op->weight;
    int is_spread = buffer && !rows->are_high;
    multiplier *run = multiplier_of(weight, is_spread);
    uint64_t at_once = vectors_at_once(&rows->tiles), num_tiles = part->behind_tiles - part->first_tile;
    uint64_t ahead_step = hc_x_group(weight) * HC_PANEL / (hc_has_nibbles(weight) ? 2 : 1);
    uint64_t piece_bytes = hc_stored_inputs(weight) / hc_x_group(weight) * ahead_step;
    hc_stream stream = hc_stream_of(hc_panel(weight, part->behind_panels), ahead_step,
                                    num_tiles == 1 ? PARTS(weight) : 1, num_tiles, piece_bytes,
                                    hc_is_far(num_tiles, hc_highest_tile(&rows->tiles)));
    for (uint64_t panel = part->first_panel; panel < part->behind_panels; panel++) {
        const uint8_t *stored = hc_panel(weight, panel);
        if (is_spread)
            spread(stored, hc_stored_inputs(weight), weight->format == HC_F4, buffer);
        uint64_t first = hc_tile_begin(&rows->tiles, part->first_tile), behind;
        for (uint64_t tile = part->first_tile; tile < part->behind_tiles; tile++, first = behind) {
            behind = hc_tile_begin(&rows->tiles, tile + 1);
            uint64_t count = behind - first;
            hc_piece piece = {.values = is_spread ? buffer : stored,
                              .scales = hc_panel_numbers(weight, weight->scales, panel),
                              .minima = weight->minima ? hc_panel_numbers(weight, weight->minima, panel) : NULL,
                              .weight = weight,
                              .x = hc_quantized_at(weight, rows->x + first * rows->row_bytes, count),
                              .ahead = hc_ahead_of(&stream, stored, tile - part->first_tile),
                              .ahead_step = ahead_step};
            for (uint64_t v = 0; v < HC_VECTORS; v += at_once) {
                piece.corner = hc_corner_of(rows->op, NULL, first, panel * HC_PANEL + v * HC_W);
                run(count, at_once, &piece);
                piece.values += at_once * sizeof(vb);
                piece.scales += at_once * HC_W;
                piece.minima += piece.minima ? at_once * HC_W : 0;
                piece.ahead.bytes = 0; /* it is asked for already */
            }
        }
    }
}

extern hc_kernel HC_NAME(linear_ints);

void HC_NAME(linear_ints)(const hc_op *any, hc_crew *crew, uint64_t member) {
    const hc_linear_op *op = (const hc_linear_op *)any;
    const hc_weight *weight = op->weight;
    int are_high = op->op.rows <= HIGH_TILES(weight) * HIGH_TILE;
    hc_tiles tiles = hc_tiles_of(op->op.rows, are_high ? HIGH_TILE : TILE);
    hc_part part = hc_part_of(tiles.count, hc_panels(weight), crew->size, member);
    hc_rows rows = {op, tiles, op->scratch, hc_row_bytes(weight), are_high};
    int are_few = op->op.rows <= HC_FEW_ROWS;
    uint8_t *buffers = (uint8_t *)op->scratch + hc_rows_bytes(op) * (are_few ? crew->size : 1);
    uint64_t buffer_bytes = hc_unpacked_bytes(weight);
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
