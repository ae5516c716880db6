/* How linear kernels divide their work: rows into tiles, which are computed at once, and tiles and panels among members.
 *
 * None of it changes a row's bits: whatever the tile, its sums are made in one order. */
#ifndef HETERO_TILES_H
#define HETERO_TILES_H

#include "packing.h"
#include "vectors.h"

#define HC_UNROLLED _Pragma("GCC unroll 16")
#define HC_MAX_TILE 12
#define HC_VECTORS (HC_PANEL / HC_W) /* in a panel */

/* Rows in tiles of at most `most`, an even number, as even as can be; all but a tile of one row have an even number, the
 * last one of them may not exist. */
typedef struct {
    uint64_t rows;
    uint64_t count;
} hc_tiles;

static inline hc_tiles hc_tiles_of(uint64_t rows, uint64_t most) {
    uint64_t pairs = (rows + 1) / 2;
    return (hc_tiles){rows, (pairs + most / 2 - 1) / (most / 2)};
}

static inline uint64_t hc_tile_begin(const hc_tiles *tiles, uint64_t tile) {
    if (tiles->rows == 1)
        return tile;
    return 2 * ((tiles->rows + 1) / 2 * tile / tiles->count);
}

/* Rows of the highest one. */
static inline uint64_t hc_highest_tile(const hc_tiles *tiles) {
    uint64_t pairs = (tiles->rows + 1) / 2;
    return tiles->rows == 1 ? 1 : 2 * ((pairs + tiles->count - 1) / tiles->count);
}

/* What a member computes. */
typedef struct {
    uint64_t first_tile, behind_tiles;
    uint64_t first_panel, behind_panels;
} hc_part;

/* Members divide panels; where that is more even, tiles as well. */
static inline hc_part hc_part_of(uint64_t num_tiles, uint64_t num_panels, uint64_t size, uint64_t member) {
    uint64_t across = 1, least = UINT64_MAX;
    for (uint64_t n = 1; n <= size && n <= num_tiles; n++) {
        uint64_t cost = (num_tiles + n - 1) / n * ((num_panels * n + size - 1) / size);
        if (size % n == 0 && cost < least) {
            least = cost;
            across = n;
        }
    }
    hc_part part;
    hc_share_of(num_tiles, across, member % across, &part.first_tile, &part.behind_tiles);
    hc_share_of(num_panels, size / across, member / across, &part.first_panel, &part.behind_panels);
    return part;
}

#define HC_AHEAD 8192u /* bytes: half of it is too late on some machines, twice as much no better */
#define HC_NEAR_ROWS 4 /* of a tile that leaves the first cache to weights */

/* What is asked for from memory, some bytes before it is read: some lines of each step, the passes dividing them. */
typedef struct {
    const char *at;
    uint64_t bytes;                    /* that there are from `at` on */
    uint64_t first_line, behind_lines; /* within a step */
    uint64_t part_lines;               /* that a part of it asks for */
    int is_far;                        /* they go to the second cache */
} hc_ahead;

/* What passes over the weights read one after the other, in steps. A kernel counts its tiles, or tiles and vectors. */
typedef struct {
    const char *end;
    uint64_t step;       /* bytes */
    uint64_t distance;   /* bytes from what is read to what is asked for */
    uint64_t lines;      /* of a step, that one pass asks for */
    uint64_t part_lines; /* of them, that a part of the step asks for */
    int is_far;
} hc_stream;

/* Of so many passes over the same `piece` bytes, which ask for what comes behind these: in parts of each step, as loads wait
 * behind many that are asked for at once. */
static inline hc_stream hc_stream_of(const void *end, uint64_t step, uint64_t parts, uint64_t passes, uint64_t piece,
                                     int is_far) {
    uint64_t lines = (step / HC_LINE + passes - 1) / passes;
    return (hc_stream){end, step, passes == 1 ? HC_AHEAD : piece, lines, (lines + parts - 1) / parts, is_far};
}

/* Whether the second cache is the better place: x of a high tile takes the first, and a piece is larger than that. */
static inline int hc_is_far(uint64_t passes, uint64_t highest_tile) { return passes > 1 || highest_tile > HC_NEAR_ROWS; }

/* Of the pass of that number, for the piece at `at`. */
static inline hc_ahead hc_ahead_of(const hc_stream *stream, const void *at, uint64_t pass) {
    uint64_t left = (uint64_t)(stream->end - (const char *)at), lines = stream->step / HC_LINE;
    uint64_t first = pass * stream->lines, behind = first + stream->lines;
    return (hc_ahead){(const char *)at + stream->distance, left > stream->distance ? left - stream->distance : 0, first,
                      behind < lines ? behind : lines, stream->part_lines, stream->is_far};
}

/* A loop over lines: unrolled, it is faster with AVX-512 and slower with AVX2. */
#if HC_W == 16
#define HC_UNROLLED_LINES _Pragma("GCC unroll 4")
#else
#define HC_UNROLLED_LINES
#endif

V_INLINE void hc_ask_for_lines(const hc_ahead *ahead, uint64_t at, uint64_t line, uint64_t behind) {
    const char *from = ahead->at + at;
    if (ahead->is_far) {
        HC_UNROLLED_LINES
        for (; line < behind; line++)
            __builtin_prefetch(from + line * HC_LINE, 0, 2);
    } else {
        HC_UNROLLED_LINES
        for (; line < behind; line++)
            __builtin_prefetch(from + line * HC_LINE);
    }
}

/* Of the step at `at`. */
V_INLINE void hc_ask_for(const hc_ahead *ahead, uint64_t at) {
    if (at < ahead->bytes)
        hc_ask_for_lines(ahead, at, ahead->first_line, ahead->behind_lines);
}

/* Of a part of the step. */
V_INLINE void hc_ask_for_part(const hc_ahead *ahead, uint64_t at, uint64_t part) {
    if (at >= ahead->bytes)
        return;
    uint64_t line = ahead->first_line + part * ahead->part_lines, behind = line + ahead->part_lines;
    hc_ask_for_lines(ahead, at, line, behind < ahead->behind_lines ? behind : ahead->behind_lines);
}

/* A corner of the result: a tile's rows and a panel, or a vector of it. */
typedef struct {
    const hc_linear_op *op;
    float *sums; /* [op's rows, out]: sums of all blocks but the last; NULL: they are kept in y, which is float32 */
    uint64_t row, column;
    uint64_t rows, columns; /* that exist from there on */
} hc_corner;

static inline hc_corner hc_corner_of(const hc_linear_op *op, float *sums, uint64_t row, uint64_t column) {
    uint64_t behind = op->weight->out;
    return (hc_corner){op, sums, row, column, op->op.rows - row, column < behind ? behind - column : 0};
}

/* Asks for what hc_write_tile is going to write, before the sums are made: in long prompts, and where other members of the
 * group read it, y is not in this core's cache. */
V_INLINE void hc_ask_for_corner(const hc_corner *corner, uint64_t rows, uint64_t columns) {
    const hc_linear_op *op = corner->op;
    const char *y = hc_to(op->y, corner->row * op->y_stride + corner->column, op->y_type);
    uint64_t width = hc_width_of(op->y_type), bytes = columns * width;
    for (uint64_t row = 0; row < rows && row < corner->rows; row++, y += op->y_stride * width)
        for (uint64_t at = 0; at < bytes; at += HC_LINE)
            __builtin_prefetch(y + at, 1);
}

/* Where a row of a corner goes. */
typedef struct {
    void *y;
    float *sum;       /* of the blocks before; y where that is float32 */
    const void *bias; /* or NULL */
} hc_row;

/* Adds a vector of a row to the sum of the blocks before, unless is_first. The last block's sum, and the bias, go to y. */
V_INLINE void hc_write(const hc_row *row, uint64_t column, uint64_t count, vf value, int is_first, int is_last,
                        const uint64_t y_type, const uint64_t bias_type) {
    if (!is_first)
        value = v_load_up_to(row->sum + column, count) + value;
    if (!is_last) {
        v_store_up_to(row->sum + column, value, count);
        return;
    }
    if (row->bias)
        value = value + v_load_up_to_as(hc_at(row->bias, column, bias_type), count, bias_type);
    v_store_up_to_as(hc_to(row->y, column, y_type), value, count, y_type);
}

V_INLINE void hc_write_rows(const hc_corner *corner, uint64_t rows, uint64_t columns, const float *sums, int is_first,
                             int is_last, const uint64_t y_type, const uint64_t bias_type) {
    const hc_linear_op *op = corner->op;
    hc_row at = {hc_to(op->y, corner->row * op->y_stride + corner->column, y_type), NULL,
                 op->bias ? hc_at(op->bias, corner->column, bias_type) : NULL};
    uint64_t width = hc_width_of(y_type), stride = op->y_stride * width, sum_stride = stride;
    uint64_t behind = columns < corner->columns ? columns : corner->columns;
    at.sum = at.y;
    if (corner->sums) {
        at.sum = corner->sums + corner->row * op->weight->out + corner->column;
        sum_stride = op->weight->out * sizeof *at.sum;
    }
    for (uint64_t row = 0; row < rows; row++, sums += columns) {
        for (uint64_t column = 0; column < behind; column += HC_W)
            hc_write(&at, column, behind - column, v_load(sums + column), is_first, is_last, y_type, bias_type);
        at.y = (char *)at.y + stride;
        at.sum = (float *)((char *)at.sum + sum_stride);
    }
}

/* Writes what exists of a tile: sums [rows, columns], of whole vectors. Types are constants where the usual ones meet. */
static __attribute__((noinline, unused)) void hc_write_tile(const hc_corner *corner, uint64_t rows, uint64_t columns,
                                                    const float *sums, int is_first, int is_last) {
    const hc_linear_op *op = corner->op;
    if (rows > corner->rows)
        rows = corner->rows;
    if (op->y_type == HC_F32 && op->type == HC_F32)
        hc_write_rows(corner, rows, columns, sums, is_first, is_last, HC_F32, HC_F32);
    else if (op->y_type == HC_BF16 && op->type == HC_BF16)
        hc_write_rows(corner, rows, columns, sums, is_first, is_last, HC_BF16, HC_BF16);
    else
        hc_write_rows(corner, rows, columns, sums, is_first, is_last, op->y_type, op->type);
}

#endif
