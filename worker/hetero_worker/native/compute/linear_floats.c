/* y = x · Wᵀ + bias for weights that are floats: all sums are of float32, with one rounding for product and addition
 * where the machine has it.
 *
 * bfloat16 weights lie in pairs of inputs, which widen by a shift and by a mask. bfloat16 rows meet them in pairs, where the
 * machine has that (AVX512_BF16): twice the products an instruction, whose sums are of float32 as well. It adds the upper
 * half of a pair first, so the input that comes first lies there, and sums have the bits of products one by one; only
 * subnormal numbers count as 0. (Where the machine has tiles, linear_tiles.c multiplies with these weights.)
 *
 * A sum is made input by input, from the first to the last of HC_BLOCK, and the blocks' sums are added in their order: so it
 * is the same for all numbers of rows. Few tiles of rows read the weights as they are stored and widen them in registers;
 * where there are more, a block of a panel is widened once, to a buffer that stays in cache.
 *
 * Rows of x are put together so that a tile's are read one after another: [inputs / 16][rows][16], of pairs in place of
 * inputs where they meet in pairs. */
#include "linear.h"
#include "small_floats.h"
#include "tiles.h"

/* Sums of a tile's rows with VECTORS of a panel stay in registers, of which AVX2 and SSE have 16, others 32. */
#if defined(__AVX512F__)
#define TILE 12
#define VECTORS HC_VECTORS
#elif defined(__AVX2__)
#define TILE 6
#define VECTORS 2
#elif defined(__aarch64__)
#define TILE 6
#define VECTORS 4
#else
#define TILE 2
#define VECTORS 4
#endif
/* Makes gcc read what it has read already. */
#if HC_W == 8
#define READ_AGAIN(from) __asm__("" : "+r"(from))
#else
#define READ_AGAIN(from) (void)0
#endif
#define PARTS 8u         /* of 16 inputs, each of which asks for its share of what comes later */
#define PAIRS HC_FORMATS /* a format of its own: HC_BF16 that meets bfloat16 rows */
#define WHOLE_PANEL (HC_W == 4 ? 1 : 2) /* rows that meet all vectors of a panel at once, at most */
#define AT_ONCE(rows) ((rows) <= WHOLE_PANEL ? HC_VECTORS : VECTORS)
#define WIDEN_FROM 3                /* tiles: to widen a block in registers twice takes no longer than once to a buffer */
#define NEAR_AGAIN 8 /* rows: products of more with widened weights take so long that these come to the first cache in time */
#define TILES_AT_ONCE 16u           /* so that their part of the result stays in cache from block to block */
#define CACHED_BYTES (1024u * 1024) /* of x that are gone through for panel after panel */

/* A block of a panel, or a vector of it, and a tile's rows. */
typedef struct {
    const char *w;
    const float *x;
    uint64_t count; /* of inputs */
    const uint16_t *scales; /* of the first group, where the format has any */
    uint64_t group, left;   /* inputs of a group, and of the first one that are left */
    hc_ahead ahead;
    uint64_t ahead_step; /* bytes of 16 inputs, as they are stored */
    hc_corner corner;
    int is_first, is_last; /* of a row's blocks */
} hc_piece;

/* Inputs that lie together: of bfloat16 two, in each lane. */
#define UNIT(format) ((format) == HC_BF16 ? 2u : 1u)

/* Bytes of a vector's lanes of a unit. */
V_INLINE uint64_t vector_bytes(uint64_t format) { return HC_W * UNIT(format) * hc_float_width(format); }

/* Input `i` of a unit. */
V_INLINE vf widened(const char *p, const int format, const uint64_t i) {
    vu pairs;
    switch (format) {
    case HC_BF16:
        memcpy(&pairs, p, sizeof pairs);
        return (vf)(i ? pairs << 16 : pairs & 0xffff0000);
    case HC_F8:
        return v_widen_f8((const uint8_t *)p);
    default:
        return v_load_as(p, (uint64_t)format);
    }
}

/* Zeros, and the place where they will be written is asked for. */
V_INLINE void begin_sums(const int rows, const int vectors, vf sums[HC_MAX_TILE][HC_VECTORS], const hc_piece *piece) {
    if (rows > 1)
        hc_ask_for_corner(&piece->corner, (uint64_t)rows, (uint64_t)vectors * HC_W);
    HC_UNROLLED
    for (int r = 0; r < rows; r++)
        HC_UNROLLED
        for (int v = 0; v < vectors; v++)
            sums[r][v] = v_all(0);
}

V_INLINE void write_sums(const int rows, const int vectors, vf sums[HC_MAX_TILE][HC_VECTORS], const hc_piece *piece) {
    float out[HC_MAX_TILE * HC_PANEL];
    HC_UNROLLED
    for (int r = 0; r < rows; r++)
        HC_UNROLLED
        for (int v = 0; v < vectors; v++)
            v_store(out + (r * vectors + v) * HC_W, sums[r][v]);
    hc_write_tile(&piece->corner, (uint64_t)rows, (uint64_t)vectors * HC_W, out, piece->is_first, piece->is_last);
}

/* Adds the products of `count` inputs of a unit, from the tile's input `at` on. */
V_INLINE void add_unit(const int rows, const int vectors, const int format, const uint64_t count, const char *w,
                       const float *x, uint64_t at, const vf *factors, vf sums[HC_MAX_TILE][HC_VECTORS]) {
    HC_UNROLLED
    for (uint64_t i = 0; i < count; i++) {
        vf weights[HC_VECTORS];
        READ_AGAIN(w); /* both inputs of a unit lie there, and there are no registers to keep them in */
        HC_UNROLLED
        for (int v = 0; v < vectors; v++) {
            weights[v] = widened(w + v * vector_bytes(format), format, i);
            if (format == HC_F8)
                weights[v] = weights[v] * factors[v];
        }
        HC_UNROLLED
        for (int r = 0; r < rows; r++) {
            vf one = v_all(x[r * HC_LANES + at + i]);
            HC_UNROLLED
            for (int v = 0; v < vectors; v++)
                sums[r][v] = v_fma(one, weights[v], sums[r][v]);
        }
    }
}

V_INLINE void multiply_singly(const int rows, const int vectors, const int format, const hc_piece *piece) {
    const uint64_t unit = UNIT(format), step = HC_VECTORS * vector_bytes(format);
    const uint16_t *scales = piece->scales;
    uint64_t of_group = piece->left;
    vf sums[HC_MAX_TILE][HC_VECTORS];
    begin_sums(rows, vectors, sums, piece);
    const float *x = piece->x;
    const char *w = piece->w;
    for (uint64_t left = piece->count, at = 0; left; at += piece->ahead_step) {
        uint64_t now = left < HC_LANES ? left : HC_LANES;
        vf factors[HC_VECTORS];
        if (format == HC_F8) {
            if (!of_group) {
                of_group = piece->group;
                scales += HC_PANEL;
            }
            of_group -= now;
            HC_UNROLLED
            for (int v = 0; v < vectors; v++)
                factors[v] = v_load_as(scales + v * HC_W, HC_F16);
        }
        if (now == HC_LANES) {
            HC_UNROLLED
            for (uint64_t part = 0, i = 0; part < PARTS; part++) {
                hc_ask_for_part(&piece->ahead, at, part);
                HC_UNROLLED
                for (; i < (part + 1) * HC_LANES / PARTS; i += unit, w += step)
                    add_unit(rows, vectors, format, unit, w, x, i, factors, sums);
            }
        } else {
            hc_ask_for(&piece->ahead, at);
            for (uint64_t i = 0; i < now / unit * unit; i += unit, w += step)
                add_unit(rows, vectors, format, unit, w, x, i, factors, sums);
            if (now % unit) /* there is no second input */
                add_unit(rows, vectors, format, 1, w, x, now - 1, factors, sums);
        }
        x += rows * HC_LANES;
        left -= now;
    }
    write_sums(rows, vectors, sums, piece);
}

#if defined(__AVX512BF16__)
V_INLINE void multiply_pairs(const int rows, const hc_piece *piece) {
    const uint64_t step = HC_VECTORS * vector_bytes(HC_BF16);
    vf sums[HC_MAX_TILE][HC_VECTORS];
    begin_sums(rows, HC_VECTORS, sums, piece);
    const uint32_t *x = (const uint32_t *)piece->x;
    const char *w = piece->w;
    for (uint64_t left = piece->count, at = 0; left; at += 2 * piece->ahead_step) {
        uint64_t now = left < 2 * HC_LANES ? left : 2 * HC_LANES;
        for (uint64_t i = 0; i < (now + 1) / 2; i++, w += step) {
            hc_ask_for_part(&piece->ahead, at + i / PARTS * piece->ahead_step, i % PARTS);
            HC_UNROLLED
            for (int r = 0; r < rows; r++) {
                __m512bh one = (__m512bh)_mm512_set1_epi32((int)x[r * HC_LANES + i]);
                HC_UNROLLED
                for (int v = 0; v < HC_VECTORS; v++)
                    sums[r][v] = (vf)_mm512_dpbf16_ps(
                        (__m512)sums[r][v], one, (__m512bh)_mm512_loadu_si512(w + v * vector_bytes(HC_BF16)));
            }
        }
        x += rows * HC_LANES;
        left -= now;
    }
    write_sums(rows, HC_VECTORS, sums, piece);
}
#endif

/* Whether rows and weights meet in pairs of inputs. */
static int has_pairs(const hc_linear_op *op) {
#if defined(__AVX512BF16__)
    return op->type == HC_BF16 && op->weight->format == HC_BF16;
#else
    return (void)op, 0;
#endif
}

V_INLINE void multiply(const int rows, const int vectors, const int format, const hc_piece *piece) {
#if defined(__AVX512BF16__)
    if (format == PAIRS) {
        multiply_pairs(rows, piece);
        return;
    }
#endif
    multiply_singly(rows, vectors, format, piece);
}

#define ROWS_CASE(n)                                                                                                  \
    case n:                                                                                                            \
        if (n <= TILE)                                                                                                 \
            multiply(n <= TILE ? n : 1, AT_ONCE(n), format, piece);                                                    \
        return;

V_INLINE void multiply_rows(uint64_t rows, const int format, const hc_piece *piece) {
    switch (rows) {
        ROWS_CASE(1)
        ROWS_CASE(2)
        ROWS_CASE(4)
        ROWS_CASE(6)
        ROWS_CASE(8)
        ROWS_CASE(10)
        ROWS_CASE(12)
    }
}

static void multiply_f32(uint64_t rows, const hc_piece *piece) { multiply_rows(rows, HC_F32, piece); }

static void multiply_bf16(uint64_t rows, const hc_piece *piece) { multiply_rows(rows, HC_BF16, piece); }

static void multiply_f16(uint64_t rows, const hc_piece *piece) { multiply_rows(rows, HC_F16, piece); }

static void multiply_f8(uint64_t rows, const hc_piece *piece) { multiply_rows(rows, HC_F8, piece); }

#if defined(__AVX512BF16__)
static void multiply_paired(uint64_t rows, const hc_piece *piece) { multiply_rows(rows, PAIRS, piece); }
#else
#define multiply_paired multiply_bf16 /* nobody asks for it */
#endif

typedef void multiplier(uint64_t rows, const hc_piece *piece);
static multiplier *const MULTIPLIERS[HC_FORMATS + 1] = {
    [HC_F32] = multiply_f32, [HC_BF16] = multiply_bf16, [HC_F16] = multiply_f16, [HC_F8] = multiply_f8,
    [PAIRS] = multiply_paired,
    /* that have no inputs */
    [HC_I8] = multiply_f32,  [HC_I4] = multiply_f32,    [HC_F4] = multiply_f32};

V_INLINE void widen_all(const char *panel, const int format, uint64_t count, float *out) {
    const uint64_t unit = UNIT(format), vector = vector_bytes(format);
    for (uint64_t i = 0; i < count; i++)
        for (uint64_t v = 0; v < HC_VECTORS; v++, out += HC_W)
            v_store(out, widened(panel + (i / unit * HC_VECTORS + v) * vector, format, i % unit));
}

static void widen(const char *panel, uint64_t format, uint64_t count, float *out) {
    if (format == HC_BF16)
        widen_all(panel, HC_BF16, count, out);
    else
        widen_all(panel, HC_F16, count, out);
}

/* A tile's rows, where it has that many; zeros for one that does not exist. */
static void put_together(const hc_linear_op *op, uint64_t first, uint64_t rows, float *out) {
    uint64_t in = op->weight->in;
    for (uint64_t r = 0; r < rows; r++) {
        const void *row = first + r < op->op.rows ? hc_at(op->x, (first + r) * op->x_stride, op->type) : NULL;
        for (uint64_t i = 0; i < hc_round_up(in, HC_LANES); i += HC_W) {
            vf value = row && i < in ? v_load_up_to_as(hc_at(row, i, op->type), in - i, op->type) : v_all(0);
            v_store(out + i / HC_LANES * HC_LANES * rows + r * HC_LANES + i % HC_LANES, value);
        }
    }
}

/* The same of bfloat16 rows, as they are, in pairs with the first input above. */
static void put_pairs_together(const hc_linear_op *op, uint64_t first, uint64_t rows, uint16_t *out) {
    uint64_t in = op->weight->in, unit = 2 * HC_LANES;
    for (uint64_t r = 0; r < rows; r++) {
        const uint16_t *row = first + r < op->op.rows ? hc_at(op->x, (first + r) * op->x_stride, HC_BF16) : NULL;
        for (uint64_t i = 0; i < in; i += unit) {
            uint64_t count = !row ? 0 : in - i < unit ? in - i : unit;
            uint32_t pairs[HC_LANES] = {0};
            if (count == unit)
                memcpy(pairs, row + i, sizeof pairs);
            else if (count)
                memcpy(pairs, row + i, count * sizeof *row);
            for (uint64_t p = 0; p < HC_LANES; p++)
                pairs[p] = pairs[p] << 16 | pairs[p] >> 16;
            memcpy(out + i * rows + r * unit, pairs, sizeof pairs);
        }
    }
}

/* Rows of x as multiply wants them. */
typedef struct {
    const hc_linear_op *op;
    hc_tiles tiles;
    const float *x; /* or pairs, of a float's width */
    uint64_t row_floats;
    float *sums; /* see hc_corner */
    int in_pairs;
} hc_rows;

static void put_tiles(const hc_rows *rows, float *out, uint64_t begin, uint64_t end) {
    for (uint64_t tile = begin; tile < end; tile++) {
        uint64_t first = hc_tile_begin(&rows->tiles, tile), behind = hc_tile_begin(&rows->tiles, tile + 1);
        float *to = out + first * rows->row_floats;
        if (rows->in_pairs)
            put_pairs_together(rows->op, first, behind - first, (uint16_t *)to);
        else
            put_together(rows->op, first, behind - first, to);
    }
}

/* Inputs [begin, behind) of a panel: as they are stored, and as they are multiplied with. */
typedef struct {
    uint64_t panel, begin, behind;
    const char *stored;
    const char *w;
    uint64_t format; /* of w */
} hc_block;

static uint64_t bytes_of_input(const hc_weight *weight) { return HC_PANEL * hc_float_width(weight->format); }

static hc_block block_of(const hc_weight *weight, uint64_t panel, uint64_t begin, uint64_t behind) {
    const char *stored = (const char *)hc_panel(weight, panel) + begin * bytes_of_input(weight);
    return (hc_block){panel, begin, begin + HC_BLOCK < behind ? begin + HC_BLOCK : behind, stored, stored, weight->format};
}

/* Scales of a panel from an input's group on. */
static const uint16_t *scales_at(const hc_weight *weight, uint64_t panel, uint64_t input) {
    return hc_panel_numbers(weight, weight->scales, panel) + (weight->group ? input / weight->group : 0) * HC_PANEL;
}

/* `pass`: number of the tile's first one of the block. */
static void multiply_tile(const hc_rows *rows, uint64_t first, uint64_t count, const hc_block *block,
                          const hc_stream *stream, uint64_t pass) {
    const hc_weight *weight = rows->op->weight;
    uint64_t at_once = AT_ONCE(count), format = rows->in_pairs ? (uint64_t)PAIRS : block->format;
    hc_piece piece = {.w = block->w,
                      .x = rows->x + first * rows->row_floats + block->begin * count / (rows->in_pairs ? 2 : 1),
                      .count = block->behind - block->begin,
                      .ahead_step = HC_LANES * bytes_of_input(weight),
                      .is_first = !block->begin,
                      .is_last = block->behind == weight->in};
    if (block->format == HC_F8) {
        piece.scales = scales_at(weight, block->panel, block->begin);
        piece.group = weight->group ? weight->group : UINT64_MAX;
        piece.left = piece.group - (weight->group ? block->begin % weight->group : 0);
    }
    for (uint64_t v = 0; v < HC_VECTORS; v += at_once) {
        piece.ahead = hc_ahead_of(stream, block->stored, pass++);
        piece.corner = hc_corner_of(rows->op, rows->sums, first, block->panel * HC_PANEL + v * HC_W);
        MULTIPLIERS[format](count, &piece);
        piece.w += at_once * vector_bytes(block->format);
        piece.scales += block->format == HC_F8 ? at_once * HC_W : 0;
    }
}

/* A block of 8-bit floats, with their scales. */
static void widen_scaled(const hc_weight *weight, const hc_block *block, float *out) {
    const uint8_t *stored = (const uint8_t *)block->stored;
    for (uint64_t i = block->begin; i < block->behind; i++) {
        const uint16_t *scales = scales_at(weight, block->panel, i);
        for (uint64_t v = 0; v < HC_PANEL; v += HC_W, stored += HC_W, out += HC_W)
            v_store(out, v_widen_f8(stored) * v_load_as(scales + v, HC_F16));
    }
}

/* Whether weights are widened before they are multiplied with. */
static int is_widened(const hc_rows *rows) { return rows->op->weight->format != HC_F32 && !rows->in_pairs; }

/* By all tiles of the part. */
static void multiply_block(const hc_rows *rows, const hc_part *part, const hc_block *block) {
    const hc_weight *weight = rows->op->weight;
    uint64_t highest = hc_highest_tile(&rows->tiles), passes = HC_VECTORS / AT_ONCE(highest);
    uint64_t all = (part->behind_tiles - part->first_tile) * passes;
    int is_far = hc_is_far(all, highest) && (rows->op->op.rows <= NEAR_AGAIN || !is_widened(rows));
    hc_stream stream = hc_stream_of(hc_panel(weight, part->behind_panels), HC_LANES * bytes_of_input(weight), PARTS, all,
                                    (block->behind - block->begin) * bytes_of_input(weight), is_far);
    uint64_t first = hc_tile_begin(&rows->tiles, part->first_tile), behind;
    for (uint64_t tile = part->first_tile; tile < part->behind_tiles; tile++, first = behind) {
        behind = hc_tile_begin(&rows->tiles, tile + 1);
        multiply_tile(rows, first, behind - first, block, &stream, (tile - part->first_tile) * passes);
    }
}

/* One tile: panels are read from the first to the last. */
static void stream(const hc_rows *rows, const hc_part *part) {
    uint64_t in = rows->op->weight->in;
    for (uint64_t panel = part->first_panel; panel < part->behind_panels; panel++) {
        uint64_t begin = 0;
        do {
            hc_block block = block_of(rows->op->weight, panel, begin, in);
            multiply_block(rows, part, &block);
            begin = block.behind;
        } while (begin < in);
    }
}

/* Many tiles: as much of x as stays in cache meets panel after panel. */
static void multiply_tiles(const hc_rows *rows, const hc_part *part, uint64_t begin, uint64_t behind) {
    const hc_weight *weight = rows->op->weight;
    _Alignas(64) float buffer[HC_BLOCK * HC_PANEL];
    for (uint64_t panel = part->first_panel; panel < part->behind_panels; panel++) {
        uint64_t at = begin;
        do {
            hc_block block = block_of(weight, panel, at, behind);
            uint64_t num_tiles = part->behind_tiles - part->first_tile;
            if (is_widened(rows) && num_tiles >= WIDEN_FROM) {
                if (weight->format == HC_F8)
                    widen_scaled(weight, &block, buffer);
                else
                    widen(block.stored, weight->format, block.behind - at, buffer);
                block.w = (const char *)buffer;
                block.format = HC_F32;
            }
            multiply_block(rows, part, &block);
            at = block.behind;
        } while (at < behind);
    }
}

/* Tiles of a part, block by block. */
static void multiply_part(const hc_rows *rows, const hc_part *part) {
    uint64_t in = rows->op->weight->in, num_tiles = part->behind_tiles - part->first_tile;
    uint64_t times = (num_tiles + TILES_AT_ONCE - 1) / TILES_AT_ONCE, now = (num_tiles + times - 1) / times;
    uint64_t most = CACHED_BYTES / (now * TILE * sizeof(float)), passes = in > most ? (in + most - 1) / most : 1;
    uint64_t inputs = hc_round_up((in + passes - 1) / passes, HC_BLOCK);
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
    hc_rows rows = {op, tiles, op->x, hc_row_bytes(weight) / sizeof(float), NULL, has_pairs(op)};
    if (rows.in_pairs)
        rows.row_floats = hc_round_up(weight->in, 2 * HC_LANES) / 2;
    uint64_t copies = !hc_copies_rows(op) ? 0 : op->op.rows <= HC_FEW_ROWS ? crew->size : 1;
    if (hc_sums_bytes(op))
        rows.sums = (float *)((char *)op->scratch + copies * hc_rows_bytes(op));
    if (op->op.rows > HC_FEW_ROWS) {
        uint64_t begin, end;
        hc_share_of(tiles.count, crew->size, member, &begin, &end);
        rows.x = op->scratch;
        put_tiles(&rows, op->scratch, begin, end);
        hc_meet(crew);
    } else if (copies) {
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
