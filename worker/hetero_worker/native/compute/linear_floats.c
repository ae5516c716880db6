/* y = x · Wᵀ + bias for weights that are floats: all sums are of float32, with one rounding for product and addition
 * where the machine has it.
 *
 * A sum is made input by input, from the first to the last of BLOCK, and the blocks' sums are added in their order: so it
 * is the same for all numbers of rows. One tile of rows reads the weights as they are stored and widens them in registers;
 * where there are more tiles, a block of some panels is widened once, to a buffer that stays in cache.
 *
 * Rows of x are put together so that a tile's are read one after another: [inputs / 16][rows][16]. */
#include "linear.h"
#include "tiles.h"

#if defined(__AVX512F__)
#define TILE 14
#define PANELS 2
#elif defined(__AVX2__) || defined(__aarch64__)
#define TILE 6
#define PANELS 1
#else
#define TILE 2
#define PANELS 1
#endif
#define FEW_ROWS_PANELS HC_MAX_PANELS /* of one or two rows: as many sums at once hide how long one takes */
#define BLOCK 256u                    /* inputs; a multiple of 16 */
#define CACHED_BYTES (512u * 1024)    /* of x that are gone through for panel after panel */

typedef struct {
    const char *panels[HC_MAX_PANELS];
    const float *x;
    uint64_t count; /* of inputs */
    hc_next next;
    uint64_t next_step; /* bytes for 16 inputs */
    hc_corner corner;
    int is_first, is_last; /* of a row's blocks */
} hc_piece;

HC_INLINE f32x16 widened(const char *p, int format) {
    switch (format) {
    case HC_F32:
        return hc_load((const float *)p);
    case HC_BF16:
        return hc_widen_bf16((const uint16_t *)p);
    default:
        return hc_widen_f16((const uint16_t *)p);
    }
}

HC_INLINE void multiply(const int rows, const int panels, const int format, const hc_piece *piece) {
    const uint64_t step = format == HC_F32 ? 64 : 32;
    f32x16 sums[HC_MAX_TILE][HC_MAX_PANELS];
    HC_UNROLLED
    for (int r = 0; r < rows; r++)
        HC_UNROLLED
        for (int p = 0; p < panels; p++)
            sums[r][p] = hc_all(0);
    const float *x = piece->x;
    const char *w[HC_MAX_PANELS];
    for (int p = 0; p < panels; p++)
        w[p] = piece->panels[p];
    for (uint64_t left = piece->count, at = 0; left; at += piece->next_step) {
        uint64_t now = left < HC_LANES ? left : HC_LANES;
        hc_ask_for(&piece->next, panels, at);
        for (uint64_t i = 0; i < now; i++) {
            f32x16 v[HC_MAX_PANELS];
            HC_UNROLLED
            for (int p = 0; p < panels; p++)
                v[p] = widened(w[p] + i * step, format);
            HC_UNROLLED
            for (int r = 0; r < rows; r++) {
                f32x16 one = hc_all(x[r * HC_LANES + i]);
                HC_UNROLLED
                for (int p = 0; p < panels; p++)
                    sums[r][p] = hc_fma(one, v[p], sums[r][p]);
            }
        }
        for (int p = 0; p < panels; p++)
            w[p] += HC_LANES * step;
        x += rows * HC_LANES;
        left -= now;
    }
    f32x16 out[HC_MAX_TILE * HC_MAX_PANELS];
    HC_UNROLLED
    for (int r = 0; r < rows; r++)
        HC_UNROLLED
        for (int p = 0; p < panels; p++)
            out[r * panels + p] = sums[r][p];
    hc_write_tile(&piece->corner, (uint64_t)rows, (uint64_t)panels, out, piece->is_first, piece->is_last);
}

#define ROWS_CASE(n)                                                                                                  \
    case n:                                                                                                            \
        if (n <= TILE)                                                                                                 \
            multiply(n <= TILE ? n : 1, panels, format, piece);                                                        \
        return;

HC_INLINE void multiply_rows(uint64_t rows, const int panels, const int format, const hc_piece *piece) {
    switch (rows) {
        ROWS_CASE(4)
        ROWS_CASE(6)
        ROWS_CASE(8)
        ROWS_CASE(10)
        ROWS_CASE(12)
        ROWS_CASE(14)
    }
}

HC_INLINE void multiply_panels(uint64_t rows, uint64_t panels, const int format, const hc_piece *piece) {
    if (rows == 1 && panels == FEW_ROWS_PANELS)
        multiply(1, FEW_ROWS_PANELS, format, piece);
    else if (rows == 1)
        multiply(1, 1, format, piece);
    else if (rows == 2 && panels == FEW_ROWS_PANELS)
        multiply(2, FEW_ROWS_PANELS, format, piece);
    else if (rows == 2)
        multiply(2, 1, format, piece);
    else if (panels == PANELS)
        multiply_rows(rows, PANELS, format, piece);
    else
        multiply_rows(rows, 1, format, piece);
}

static void multiply_f32(uint64_t rows, uint64_t panels, const hc_piece *piece) {
    multiply_panels(rows, panels, HC_F32, piece);
}

static void multiply_bf16(uint64_t rows, uint64_t panels, const hc_piece *piece) {
    multiply_panels(rows, panels, HC_BF16, piece);
}

static void multiply_f16(uint64_t rows, uint64_t panels, const hc_piece *piece) {
    multiply_panels(rows, panels, HC_F16, piece);
}

typedef void multiplier(uint64_t rows, uint64_t panels, const hc_piece *piece);
static multiplier *const MULTIPLIERS[] = {[HC_F32] = multiply_f32, [HC_BF16] = multiply_bf16, [HC_F16] = multiply_f16};

static void widen(const char *panel, uint64_t format, uint64_t count, float *out) {
    for (uint64_t i = 0; i < count; i++)
        hc_store(out + i * HC_LANES, format == HC_BF16 ? hc_widen_bf16((const uint16_t *)panel + i * HC_LANES)
                                                       : hc_widen_f16((const uint16_t *)panel + i * HC_LANES));
}

/* A tile's rows, where it has that many; zeros for one that does not exist. */
static void put_together(const hc_linear_op *op, uint64_t first, uint64_t rows, float *out) {
    uint64_t in = op->weight->in;
    for (uint64_t r = 0; r < rows; r++) {
        const float *row = first + r < op->op.rows ? op->x + (first + r) * op->x_stride : NULL;
        for (uint64_t i = 0; i < in; i += HC_LANES) {
            f32x16 value = hc_all(0);
            if (row)
                value = i + HC_LANES <= in ? hc_load(row + i) : hc_load_some(row + i, in - i);
            hc_store(out + i * rows + r * HC_LANES, value);
        }
    }
}

/* Rows of x as multiply wants them. */
typedef struct {
    const hc_linear_op *op;
    hc_tiles tiles;
    const float *x;
    uint64_t row_floats;
} hc_rows;

static void put_tiles(const hc_rows *rows, float *out, uint64_t begin, uint64_t end) {
    for (uint64_t tile = begin; tile < end; tile++) {
        uint64_t first = hc_tile_begin(&rows->tiles, tile), behind = hc_tile_begin(&rows->tiles, tile + 1);
        put_together(rows->op, first, behind - first, out + first * rows->row_floats);
    }
}

/* Inputs [begin, behind) of some panels, and the inputs that are read after them. */
typedef struct {
    uint64_t panel, panels, begin, behind;
    const char *next;
} hc_block;

static uint64_t bytes_of_input(const hc_weight *weight) { return HC_PANEL * (weight->format == HC_F32 ? 4 : 2); }

static hc_block block_of(const hc_weight *weight, const hc_part *part, uint64_t panel, uint64_t at_once, uint64_t begin,
                         uint64_t first, uint64_t last) {
    hc_block block = {panel, part->behind_panels - panel < at_once ? 1 : at_once, begin, begin + BLOCK, NULL};
    uint64_t next = block.behind;
    if (block.behind >= last) {
        block.behind = last;
        next = first;
        panel = panel + block.panels < part->behind_panels ? panel + block.panels : panel;
    }
    block.next = (const char *)hc_panel(weight, panel) + next * bytes_of_input(weight);
    return block;
}

/* Weights are at w, panels `distance` bytes apart. */
static void multiply_block(const hc_rows *rows, const hc_part *part, uint64_t tile, const hc_block *block,
                           const char *w, uint64_t distance, uint64_t format) {
    const hc_weight *weight = rows->op->weight;
    uint64_t first = hc_tile_begin(&rows->tiles, tile), count = hc_tile_begin(&rows->tiles, tile + 1) - first;
    uint64_t step = HC_LANES * bytes_of_input(weight);
    hc_piece piece = {.x = rows->x + first * rows->row_floats + block->begin * count,
                      .count = block->behind - block->begin,
                      .next = hc_next_of(block->next, block->panels, hc_panel_bytes(weight), step,
                                         tile - part->first_tile, part->behind_tiles - part->first_tile),
                      .next_step = step,
                      .corner = hc_corner_of(rows->op, first, block->panel),
                      .is_first = !block->begin,
                      .is_last = block->behind == weight->in};
    for (uint64_t p = 0; p < block->panels; p++)
        piece.panels[p] = w + p * distance;
    MULTIPLIERS[format](count, block->panels, &piece);
}

static const char *weights_at(const hc_weight *weight, const hc_block *block) {
    return (const char *)hc_panel(weight, block->panel) + block->begin * bytes_of_input(weight);
}

/* One tile: panels are read from the first to the last. */
static void stream(const hc_rows *rows, const hc_part *part) {
    const hc_weight *weight = rows->op->weight;
    uint64_t at_once = rows->tiles.rows <= 2 ? FEW_ROWS_PANELS : PANELS;
    hc_block block;
    for (uint64_t panel = part->first_panel; panel < part->behind_panels; panel += block.panels) {
        uint64_t begin = 0;
        do {
            block = block_of(weight, part, panel, at_once, begin, 0, weight->in);
            multiply_block(rows, part, part->first_tile, &block, weights_at(weight, &block), hc_panel_bytes(weight),
                           weight->format);
            begin = block.behind;
        } while (begin < weight->in);
    }
}

/* Many tiles: as much of x as stays in cache meets panel after panel. */
static void multiply_tiles(const hc_rows *rows, const hc_part *part, uint64_t begin, uint64_t behind) {
    const hc_weight *weight = rows->op->weight;
    _Alignas(64) float buffer[PANELS * BLOCK * HC_LANES];
    hc_block block;
    for (uint64_t panel = part->first_panel; panel < part->behind_panels; panel += block.panels) {
        uint64_t at = begin;
        do {
            block = block_of(weight, part, panel, PANELS, at, begin, behind);
            const char *w = weights_at(weight, &block);
            uint64_t distance = hc_panel_bytes(weight);
            if (weight->format != HC_F32) {
                for (uint64_t p = 0; p < block.panels; p++)
                    widen(w + p * distance, weight->format, block.behind - at, buffer + p * BLOCK * HC_LANES);
                w = (const char *)buffer;
                distance = BLOCK * HC_LANES * sizeof(float);
            }
            for (uint64_t tile = part->first_tile; tile < part->behind_tiles; tile++)
                multiply_block(rows, part, tile, &block, w, distance, HC_F32);
            at = block.behind;
        } while (at < behind);
    }
}

/* Tiles of a part, block by block. */
static void multiply_part(const hc_rows *rows, const hc_part *part) {
    uint64_t in = rows->op->weight->in, num_tiles = part->behind_tiles - part->first_tile;
    uint64_t tiles_at_once = CACHED_BYTES / (BLOCK * TILE * sizeof(float));
    uint64_t now = num_tiles < tiles_at_once ? num_tiles : tiles_at_once;
    uint64_t inputs = CACHED_BYTES / (now * TILE * sizeof(float)) / BLOCK * BLOCK;
    for (uint64_t first = part->first_tile; first < part->behind_tiles; first += now) {
        hc_part some = *part;
        some.first_tile = first;
        some.behind_tiles = first + now < part->behind_tiles ? first + now : part->behind_tiles;
        for (uint64_t begin = 0, behind;; begin = behind) {
            behind = begin + inputs < in ? begin + inputs : in;
            multiply_tiles(rows, &some, begin, behind);
            if (behind == in)
                break;
        }
    }
}

extern hc_kernel HC_NAME(linear_floats);

void HC_NAME(linear_floats)(const hc_op *any, hc_crew *crew, uint64_t member) {
    const hc_linear_op *op = (const hc_linear_op *)any;
    const hc_weight *weight = op->weight;
    hc_tiles tiles = hc_tiles_of(op->op.rows, TILE);
    hc_part part = hc_part_of(tiles.count, hc_panels(weight), crew->size, member);
    hc_rows rows = {op, tiles, op->x, hc_row_bytes(weight) / sizeof(float)};
    if (op->op.rows > HC_FEW_ROWS) {
        uint64_t begin, end;
        hc_share_of(tiles.count, crew->size, member, &begin, &end);
        rows.x = op->scratch;
        put_tiles(&rows, op->scratch, begin, end);
        hc_meet(crew);
    } else if (op->op.rows > 1) {
        float *own = (float *)((char *)op->scratch + member * hc_rows_bytes(op));
        rows.x = own;
        put_tiles(&rows, own, part.first_tile, part.behind_tiles);
    }
    if (part.first_tile == part.behind_tiles || part.first_panel == part.behind_panels)
        return;
    if (tiles.count == 1)
        stream(&rows, &part);
    else
        multiply_part(&rows, &part);
}
