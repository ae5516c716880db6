/* Low-rank products of adapters: each row with the factors of its own adapter.
 *
 * Some rows at a time, members first share the products with `down`, then meet, then share the columns of y. A member has
 * the same columns of every row, so that it reads its part of `up` from its own cache. Rows of one adapter are computed
 * together, with one reading of its factors; a row's sums are made in the same order with others and alone.
 *
 * Factors are short rows in many places, which a processor does not foresee: a member asks for the next ones before it
 * computes with those that it has asked for. */
#include "low_rank.h"
#include "vectors.h"

extern hc_kernel HC_NAME(low_rank);

#define PIECE 64                       /* columns that are one member's */
#define BLOCK 8                        /* rows of `down` that are one member's */
#define TOGETHER (HC_W == 16 ? 4 : 2)  /* rows of one adapter that are computed at once: as many as registers hold */
#define VECTORS 4                      /* of columns that are computed at once */
#define MOST_ASKED (128u * 1024) /* bytes of `up`, of a part: more would put out of the second cache what comes first */

/* Rows that have one adapter. */
typedef struct {
    const hc_factors *factors; /* for the first part */
    uint64_t count;
    uint64_t rows[TOGETHER]; /* counted from the first that is computed now */
} hc_tile;

/* Puts rows [first, first + rows) that have adapters in tiles; returns how many there are. */
static uint64_t fill_tiles(const hc_low_rank_op *op, uint64_t first, uint64_t rows, hc_tile *tiles) {
    uint64_t count = 0;
    for (uint64_t row = 0; row < rows; row++) {
        uint64_t number = (uint64_t)op->numbers[first + row], at = 0;
        const hc_factors *factors = number && number < op->adapters ? op->table[number] : NULL;
        if (!factors)
            continue;
        while (at < count && (tiles[at].factors != factors || tiles[at].count == TOGETHER))
            at++;
        if (at == count)
            tiles[count++] = (hc_tile){factors, 0, {0}};
        tiles[at].rows[tiles[at].count++] = row;
    }
    return count;
}

static float *products_of(const hc_low_rank_op *op, uint64_t row, uint64_t part) {
    return (float *)op->scratch + (row * op->parts + part) * HC_MAX_RANK;
}

/* y[k] of each row = x times row k of `down`, in an order that only the width decides. */
V_INLINE void shrink_some(const hc_low_rank_op *op, const void *const *x, const int rows, const void *down, float *const *y,
                          const int count, const uint64_t x_type, const uint64_t type) {
    vf sums[TOGETHER][BLOCK] = {{{0}}};
    for (uint64_t i = 0; i < op->in; i += HC_W) {
        vf factors[BLOCK];
#pragma GCC unroll 8
        for (int k = 0; k < count; k++)
            factors[k] = v_load_up_to_as(hc_at(down, (uint64_t)k * op->in + i, type), op->in - i, type);
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++) {
            vf v = v_load_up_to_as(hc_at(x[row], i, x_type), op->in - i, x_type);
#pragma GCC unroll 8
            for (int k = 0; k < count; k++)
                sums[row][k] = v_fma(v, factors[k], sums[row][k]);
        }
    }
    for (int row = 0; row < rows; row++)
        for (int k = 0; k < count; k++)
            y[row][k] = v_sum(sums[row][k]);
}

/* shrink_some for `count` rows of `down` from `first` on, some at a time. */
V_INLINE void shrink_rows(const hc_low_rank_op *op, const void *const *x, const int rows, const hc_factors *factors,
                          uint64_t first, uint64_t count, float *const *products, const uint64_t x_type,
                          const uint64_t type) {
    const int most = rows == 1 ? BLOCK : BLOCK / 2;
    for (uint64_t end = first + count; first < end;) {
        int some = end - first >= (uint64_t)most ? most : 1;
        const void *down = hc_at(factors->down, first * op->in, type);
        float *y[TOGETHER];
        for (int row = 0; row < rows; row++)
            y[row] = products[row] + first;
        if (some == most)
            shrink_some(op, x, rows, down, y, most, x_type, type);
        else
            shrink_some(op, x, rows, down, y, 1, x_type, type);
        first += (uint64_t)some;
    }
}

V_INLINE void shrink_tile(const hc_low_rank_op *op, const hc_tile *tile, uint64_t first_row, uint64_t part, uint64_t first,
                          const uint64_t x_type, const uint64_t type) {
    const hc_factors *factors = tile->factors + part;
    uint64_t left = factors->rank - first, count = left < BLOCK ? left : BLOCK;
    const void *x[TOGETHER];
    float *products[TOGETHER];
    for (uint64_t i = 0; i < tile->count; i++) {
        x[i] = hc_at(op->x, (first_row + tile->rows[i]) * op->x_stride, x_type);
        products[i] = products_of(op, tile->rows[i], part);
    }
    if (tile->count == TOGETHER) {
        shrink_rows(op, x, TOGETHER, factors, first, count, products, x_type, type);
        return;
    }
    for (uint64_t i = 0; i < tile->count; i++)
        shrink_rows(op, x + i, 1, factors, first, count, products + i, x_type, type);
}

/* y += products times `up`, for some vectors of columns, each of `left` at least, rounded once. */
V_INLINE void expand_some(const hc_factors *factors, const float *const *products, const int rows, uint64_t column,
                          uint64_t width, void *const *y, const int vectors, const uint64_t left, const uint64_t y_type,
                          const uint64_t type) {
    vf sums[TOGETHER][VECTORS] = {{{0}}};
    for (uint64_t k = 0; k < factors->rank; k++) {
        const void *up = hc_at(factors->up, k * width + column, type);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            vf factor = v_load_up_to_as(hc_at(up, (uint64_t)v * HC_W, type), left, type);
#pragma GCC unroll 4
            for (int row = 0; row < rows; row++)
                sums[row][v] = v_fma(v_all(products[row][k]), factor, sums[row][v]);
        }
    }
    for (int row = 0; row < rows; row++) {
        for (int v = 0; v < vectors; v++) {
            void *at = hc_to(y[row], column + (uint64_t)v * HC_W, y_type);
            v_store_up_to_as(at, v_load_up_to_as(at, left, y_type) + sums[row][v], left, y_type);
        }
    }
}

V_INLINE void expand_rows(const hc_factors *factors, const float *const *products, const int rows, uint64_t begin,
                          uint64_t end, uint64_t width, void *const *y, const uint64_t y_type, const uint64_t type) {
    for (; end - begin >= VECTORS * HC_W; begin += VECTORS * HC_W)
        expand_some(factors, products, rows, begin, width, y, VECTORS, HC_W, y_type, type);
    for (; begin < end; begin += HC_W)
        expand_some(factors, products, rows, begin, width, y, 1, end - begin < HC_W ? end - begin : HC_W, y_type, type);
}

/* A piece of the columns of a part, which begins at `first_column`. */
V_INLINE void expand_tile(const hc_low_rank_op *op, const hc_tile *tile, uint64_t first_row, uint64_t part, uint64_t begin,
                          uint64_t end, uint64_t first_column, const uint64_t y_type, const uint64_t type) {
    const float *products[TOGETHER];
    void *y[TOGETHER];
    for (uint64_t i = 0; i < tile->count; i++) {
        products[i] = products_of(op, tile->rows[i], part);
        y[i] = hc_to(op->y, (first_row + tile->rows[i]) * op->ends[op->parts - 1] + first_column, y_type);
    }
    uint64_t width = op->ends[part] - first_column;
    if (tile->count == TOGETHER) {
        expand_rows(tile->factors + part, products, TOGETHER, begin, end, width, y, y_type, type);
        return;
    }
    for (uint64_t i = 0; i < tile->count; i++)
        expand_rows(tile->factors + part, products + i, 1, begin, end, width, y + i, y_type, type);
}

/* Factors that a member computes with next: those of a tile and a part, from row `k` of `down` on. */
typedef struct {
    const hc_tile *tile, *behind;
    uint64_t part, k;
    uint64_t turn; /* blocks of `down` before it, of all members */
} hc_place;

/* Goes on to the next block of `down` that is the member's, from here on; returns 0 if there is none. */
static int find_block(const hc_low_rank_op *op, const hc_crew *crew, uint64_t member, hc_place *place) {
    for (; place->tile < place->behind; place->tile++, place->part = 0)
        for (; place->part < op->parts; place->part++, place->k = 0)
            for (; place->k < place->tile->factors[place->part].rank; place->k += BLOCK)
                if (place->turn++ % crew->size == member)
                    return 1;
    return 0;
}

/* The same for a part that has `up`. */
static int find_part(const hc_low_rank_op *op, hc_place *place) {
    for (; place->tile < place->behind; place->tile++, place->part = 0)
        for (; place->part < op->parts; place->part++)
            if (place->tile->factors[place->part].rank)
                return 1;
    return 0;
}

static void ask_for(const void *p, uint64_t bytes) {
    for (uint64_t at = 0; at < bytes; at += HC_LINE)
        __builtin_prefetch((const char *)p + at, 0, 2);
}

static void ask_for_block(const hc_low_rank_op *op, const hc_place *place) {
    const hc_factors *factors = place->tile->factors + place->part;
    uint64_t left = factors->rank - place->k, bytes = op->in * hc_width_of(factors->type);
    ask_for((const char *)factors->down + place->k * bytes, (left < BLOCK ? left : BLOCK) * bytes);
}

static uint64_t part_begin(const hc_low_rank_op *op, uint64_t part) { return part ? op->ends[part - 1] : 0; }

/* The member's columns of `up`. */
static void ask_for_columns(const hc_low_rank_op *op, const hc_place *place, const hc_crew *crew, uint64_t member) {
    const hc_factors *factors = place->tile->factors + place->part;
    uint64_t width = op->ends[place->part] - part_begin(op, place->part), bytes = hc_width_of(factors->type);
    uint64_t behind = (1 + MOST_ASKED / (factors->rank * PIECE * bytes)) * crew->size * PIECE;
    behind = behind < width ? behind : width;
    for (uint64_t k = 0; k < factors->rank; k++)
        for (uint64_t piece = member * PIECE; piece < behind; piece += crew->size * PIECE) {
            uint64_t left = width - piece;
            ask_for((const char *)factors->up + (k * width + piece) * bytes, (left < PIECE ? left : PIECE) * bytes);
        }
}

V_INLINE void shrink(const hc_low_rank_op *op, uint64_t first_row, hc_place place, const hc_crew *crew, uint64_t member,
                     const uint64_t x_type) {
    hc_place first_part = place;
    int is_there = find_block(op, crew, member, &place), goes_on;
    if (is_there)
        ask_for_block(op, &place);
    for (hc_place next; is_there; place = next, is_there = goes_on) {
        next = place;
        next.k += BLOCK;
        goes_on = find_block(op, crew, member, &next);
        if (goes_on)
            ask_for_block(op, &next);
        V_CACHED(place.tile->factors[place.part].type, shrink_tile, op, place.tile, first_row, place.part, place.k, x_type);
    }
    if (find_part(op, &first_part))
        ask_for_columns(op, &first_part, crew, member);
}

V_INLINE void expand(const hc_low_rank_op *op, uint64_t first_row, hc_place place, const hc_crew *crew, uint64_t member,
                     const uint64_t y_type) {
    int is_there = find_part(op, &place), goes_on;
    for (hc_place next; is_there; place = next, is_there = goes_on) {
        next = place;
        next.part++;
        goes_on = find_part(op, &next);
        if (goes_on)
            ask_for_columns(op, &next, crew, member);
        uint64_t begin = part_begin(op, place.part), width = op->ends[place.part] - begin;
        for (uint64_t piece = member * PIECE; piece < width; piece += crew->size * PIECE) {
            uint64_t end = piece + PIECE < width ? piece + PIECE : width;
            V_CACHED(place.tile->factors[place.part].type, expand_tile, op, place.tile, first_row, place.part, piece, end, begin, y_type);
        }
    }
}

void HC_NAME(low_rank)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_low_rank_op *op = (const hc_low_rank_op *)header;
    hc_tile tiles[HC_LOW_RANK_ROWS];
    for (uint64_t first = 0; first < header->rows; first += HC_LOW_RANK_ROWS) {
        uint64_t left = header->rows - first, rows = left < HC_LOW_RANK_ROWS ? left : HC_LOW_RANK_ROWS;
        uint64_t count = fill_tiles(op, first, rows, tiles);
        if (first)
            hc_meet(crew); /* before the products are written again */
        hc_place place = {tiles, tiles + count, 0, 0, 0};
        V_TYPED(op->type, shrink, op, first, place, crew, member);
        hc_meet(crew);
        V_TYPED(op->y_type, expand, op, first, place, crew, member);
    }
}
