/* What a rank on host cores computes with, behind a plain ABI: no torch, no C++, nothing of Python.
 *
 * An operation is a struct whose first member is an hc_op. hc_run gives operations, one after another, to a team of
 * threads that stay on their cores; an operation may use all that earlier ones wrote. All addresses are the caller's,
 * who keeps them alive, and are aligned to 64 bytes where a struct says "packed", to their element elsewhere.
 *
 * Activations are row-major matrices whose rows are a step's tokens. Their `type` is HC_F32 or HC_BF16. All arithmetic is
 * in float32: kernels widen what they load, and round once what they store, to nearest, ties to even.
 *
 * A row's bits depend on that row's own inputs only: not on the number of rows, the row's place among them, or the
 * team's size. Every kernel keeps one order of additions for all of these.
 *
 * Kernels are compiled once for each instruction set (HC_ISA); the best that the processor has is taken when the
 * library is first used. hc_use takes another, for tests and for measuring. */
#ifndef HETERO_COMPUTE_H
#define HETERO_COMPUTE_H

#include <stdint.h>

#if defined(__GNUC__)
#define HC_API __attribute__((visibility("default")))
#else
#define HC_API
#endif

#define HC_MAX_MEMBERS 1024 /* the resource's most cores a rank */
#define HC_MAX_RANK 256 /* of adapters' factors */
#define HC_PANEL 32 /* output rows of a matrix that are packed together */

/* How a matrix is stored. */
enum hc_format {
    HC_F32 = 0,
    HC_BF16 = 1,
    HC_F16 = 2,
    HC_I8 = 3, /* w = v * scale + minimum, v in -128..127; without minima w = v * scale */
    HC_I4 = 4, /* w = v * scale + minimum, v in 0..15; without minima w = (v - 8) * scale */
    HC_F8 = 5, /* w = v / 256 * scale, v an 8-bit float (E4M3) */
    HC_F4 = 6, /* w = 2 * v * scale, v a 4-bit float (E2M1) */
    HC_FORMATS
};

/* A packed matrix [out, in]. What the layout of `values`, `scales` and `minima` is, is pack.c's to say. */
typedef struct {
    uint64_t format;
    uint64_t out;
    uint64_t in;
    uint64_t group;     /* inputs that share a scale, a multiple of 16; 0: all of a row, or a format without scales */
    const void *values;  /* packed */
    const void *scales;  /* packed; NULL for formats without */
    const void *minima;  /* packed; NULL without minima */
} hc_weight;

enum hc_kind {
    HC_PACK = 0,
    HC_LINEAR,
    HC_EMBED,
    HC_NORM,
    HC_GATED,
    HC_SQUARES,
    HC_LATENT,
    HC_HEADS,
    HC_DELTA,
    HC_OPEN,
    HC_PRODUCTS,
    HC_ROTATE,
    HC_ATTEND,
    HC_ATTEND_SPAN,
    HC_ADD,
    HC_PICK,
    HC_CHOOSE,
    HC_STEP_ON,
    HC_ROUTE,
    HC_EXPERTS,
    HC_LOW_RANK,
    HC_CALL,
    HC_KINDS
};

typedef struct {
    uint64_t kind;
    uint64_t rows;
} hc_op;

/* Packs rows of a matrix; op.rows is weight->out, whose values, scales and minima are written here. */
typedef struct {
    hc_op op;
    hc_weight *weight;
    const void *values;   /* float, uint16_t (bf16, f16), or one value a byte: [out, in] */
    uint64_t stride;      /* elements from one row of `values` to the next */
    const float *scales;  /* [out, groups], or NULL */
    const float *minima;  /* [out, groups], or NULL */
} hc_pack_op;

/* y = x · Wᵀ + bias. */
typedef struct {
    hc_op op;
    const hc_weight *weight;
    uint64_t type;      /* of x and bias */
    uint64_t y_type;    /* `type`, or HC_F32 */
    const void *x;
    uint64_t x_stride;  /* elements from row to row */
    const void *bias;   /* [out], or NULL */
    void *y;
    uint64_t y_stride;
    void *scratch;      /* hc_scratch_bytes of this op; NULL if that is 0 */
} hc_linear_op;

/* y[i] = row ids[i] - first of the table, times scale; zeros if the table has no such row. */
typedef struct {
    hc_op op;
    const hc_weight *table;
    uint64_t type; /* of y */
    const int64_t *ids;
    int64_t first;
    double scale;
    void *y;       /* [rows, in] */
} hc_embed_op;

/* x += delta, unless delta is NULL; then y = x / rms(x) * weight, with x as it is stored. y may be x if delta is NULL. */
typedef struct {
    hc_op op;
    uint64_t type;        /* of x, delta and y */
    uint64_t weight_type;
    uint64_t width;
    void *x;              /* [rows, width] */
    const void *delta;    /* [rows, width], or NULL */
    const void *weight;
    double eps;
    void *y;
} hc_norm_op;

enum hc_activation { HC_SILU = 0, HC_GELU_TANH = 1, HC_GELU = 2, HC_CLAMPED_SWIGLU = 3 };

/* y = activation(gate) * up, of gate_up [rows, gate | up], or if `up` is given of gates [rows, columns] and it. Of
 * HC_CLAMPED_SWIGLU y = (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up between -limit and
 * limit. With `product`, gate_up is its y: this operation makes it first, or sums gates and ups where they stay in cache, and
 * leaves gate_up as it was. */
typedef struct {
    hc_op op;
    uint64_t type; /* of gate_up and y */
    uint64_t activation;
    uint64_t columns;
    const void *gate_up;
    void *y;       /* [rows, columns] */
    double alpha;  /* of HC_CLAMPED_SWIGLU, as `limit` */
    double limit;
    const void *up;     /* [rows, columns], or NULL */
    uint64_t up_stride; /* elements from one of its rows to the next */
    const hc_linear_op *product; /* of the same rows and types, [2 * columns] outputs side by side; or NULL */
} hc_gated_op;

/* y[i] = sums of squares of row i's query heads and of its key heads, of qkv [rows, heads + 2 * kv_heads, head_dim], each
 * divided by a width: added up over ranks they are mean squares. */
typedef struct {
    hc_op op;
    uint64_t type;       /* of qkv */
    uint64_t heads;
    uint64_t kv_heads;
    uint64_t head_dim;
    const void *qkv;
    double query_width;  /* elements of all ranks' query heads */
    double key_width;
    float *y;            /* [rows, 2] */
} hc_squares_op;

/* Norms, if there are weights, and rotates query and key heads of qkv [rows, heads + 2 * kv_heads, head_dim], in place,
 * and norms value heads if `norms_values`; then puts keys and values where `slots` say, unless keys is NULL.
 * Rotation: h * cos + swapped halves of h * signed_sin, with the tables' rows at `positions`. */
typedef struct {
    hc_op op;
    uint64_t type;             /* of qkv and tables */
    uint64_t norm_type;        /* of norm_weights */
    uint64_t cache_type;       /* of keys and values, HC_F16 too */
    uint64_t heads;
    uint64_t kv_heads;
    uint64_t head_dim;
    void *qkv;
    const void *cos;           /* [positions, head_dim] */
    const void *signed_sin;    /* [positions, head_dim] */
    const int64_t *positions;  /* [rows] */
    const void *norm_weights;  /* [heads + kv_heads, head_dim], or NULL */
    double eps;
    void *keys;                /* [slots, kv_heads, head_dim], or NULL */
    void *values;
    const int64_t *slots;      /* [rows] */
    const float *mean_squares; /* [rows, 2]: what norms divide by, of all query heads and of all key heads; NULL: each
                                * head's own */
    uint64_t norms_values;     /* value heads are normed, without a weight */
} hc_rotate_op;

/* Latent attention's cached keys: [norm of the first `rank` elements of compressed | rotation of the others], to `slots`.
 * Rotates the last elements of query heads, too, to the last ones of `out`; the others stay. */
typedef struct {
    hc_op op;
    uint64_t type;             /* of all matrices but keys */
    uint64_t cache_type;       /* of keys, HC_F16 too */
    uint64_t heads;
    uint64_t nope;             /* elements of a query head that are not rotated */
    uint64_t rope;             /* elements that are */
    uint64_t rank;
    const void *query;         /* [rows, heads, nope + rope] */
    const void *compressed;    /* [rows, rank + rope] */
    const void *cos;           /* [positions, rope] */
    const void *signed_sin;    /* [positions, rope] */
    const int64_t *positions;  /* [rows] */
    const void *norm_weight;   /* [rank] */
    double eps;
    void *out;                 /* [rows, heads, rank + rope] */
    void *keys;                /* [slots, rank + rope] */
    const int64_t *slots;      /* [rows] */
} hc_latent_op;

/* y = x · Wᵀ of each head by itself; strides are elements from row to row and from head to head. */
typedef struct {
    hc_op op;
    const hc_weight *const *weights; /* [heads], of one shape */
    uint64_t heads;
    uint64_t type;                   /* of x and y */
    const void *x;
    uint64_t x_stride;
    uint64_t x_head_stride;
    void *y;
    uint64_t y_stride;
    uint64_t y_head_stride;
    void *scratch;                   /* hc_scratch_bytes of this op */
} hc_heads_op;

/* The gated delta rule (arXiv:2412.06464): convolution, update of the sequences' states, norm of heads, and gate. op.rows
 * is the number of sequences, which lie one after another with `tokens` rows each. A sequence that has no more tokens
 * begins with empty states; others go on with theirs. */
typedef struct {
    hc_op op;
    uint64_t type;            /* of mixed, gates and y */
    uint64_t tokens;
    uint64_t key_heads;
    uint64_t value_heads;     /* a multiple of key_heads: [h * g, (h + 1) * g) have key head h */
    uint64_t key_dim;
    uint64_t value_dim;
    uint64_t taps;            /* of the convolution, at least 1 */
    const void *mixed;        /* [rows * tokens, q | k | v | z] of all heads each; the first three are channels */
    const void *gates;        /* [rows * tokens, b | a] of value heads each, before their functions */
    const float *convolution; /* [taps, channels], the token's own tap last */
    const float *decay;       /* [value_heads]: states are multiplied by exp(decay * softplus(a + decay_bias)) */
    const float *decay_bias;  /* [value_heads] */
    const float *norm;        /* [value_dim] */
    double eps;
    float *matrices;          /* [slots, value_heads, key_dim, value_dim] */
    float *windows;           /* [slots, taps - 1, channels]: the last inputs of the convolution */
    const int64_t *slots;     /* [rows], no two alike */
    const int32_t *lengths;   /* [rows]: tokens of a sequence, these included */
    void *y;                  /* [rows * tokens, value_heads * value_dim] */
    void *scratch;            /* hc_scratch_bytes of this op */
} hc_delta_op;

/* x *= sigmoid(gates), which are one a column, or one for the whole row. */
typedef struct {
    hc_op op;
    uint64_t type;       /* of x */
    uint64_t gates_type;
    uint64_t columns;
    uint64_t is_whole;
    void *x;             /* [rows, columns] */
    const void *gates;   /* [rows, columns], or [rows] */
} hc_open_op;

/* y[i] = row i of x times the weights. */
typedef struct {
    hc_op op;
    uint64_t type;       /* of x */
    uint64_t width;
    const void *x;       /* [rows, width] */
    const float *weight; /* [width] */
    float *y;            /* [rows] */
} hc_products_op;

/* A paged cache of one layer, and how it is attended to. */
typedef struct {
    uint64_t type;      /* of keys and values, HC_F16 too */
    uint64_t rows_type; /* of queries and results */
    const void *keys;   /* [slots, kv_heads, head_dim]; slot = block id * block_size + offset */
    const void *values;
    uint64_t block_size;
    uint64_t kv_heads;
    uint64_t heads;    /* query heads, a multiple of kv_heads: [h * g, (h + 1) * g) read KV head h */
    uint64_t head_dim; /* a multiple of 8 */
    double scale;
    uint64_t window;   /* tokens up to and including itself; 0: all */
    double soft_cap;   /* scores s become cap * tanh(s / cap); 0: they stay */
    const float *sinks; /* [heads]: a score more of each query head, of a token without a value; or NULL */
} hc_cache;

/* One query token a sequence. */
typedef struct {
    hc_op op;
    hc_cache cache;
    const void *query;      /* [rows, heads, head_dim] */
    uint64_t query_stride;  /* elements from row to row */
    const int32_t *lengths; /* [rows]: tokens to attend to, the new one included, which is in the cache */
    const int32_t *tables;  /* [rows, table_stride] block ids */
    uint64_t table_stride;
    void *out;              /* [rows, heads * head_dim] */
    void *scratch;          /* hc_scratch_bytes of this op */
    uint64_t longest;       /* lengths are at most this: scratch is sized by it */
} hc_attend_op;

/* Tokens num_computed .. num_computed + rows of one sequence, which are in the cache, attend causally. */
typedef struct {
    hc_op op;
    hc_cache cache;
    const void *query;
    uint64_t query_stride;
    uint64_t num_computed;
    const int32_t *table; /* block ids of the sequence */
    void *out;            /* [rows, heads * head_dim] */
    void *scratch;
} hc_attend_span_op;

/* x = factor * (x + all deltas), in their order, rounded once. */
typedef struct {
    hc_op op;
    uint64_t type;
    uint64_t width;
    void *x;                   /* [rows, width], as each delta */
    const void *const *deltas; /* [num_deltas] */
    uint64_t num_deltas;
    float factor;
} hc_add_op;

/* y[i] = x[index[i]], or x[i] without an index, or zeros without an x; op.rows is the number of y's rows. */
typedef struct {
    hc_op op;
    uint64_t row_bytes;
    const void *x;        /* or NULL */
    const int64_t *index; /* [rows], or NULL */
    void *y;
    uint64_t x_stride;    /* bytes from one row to the next; 0: row_bytes */
    uint64_t y_stride;
} hc_pick_op;

/* best[shard, i] = the best score of x[i] and its column, counted from `first`; of equals the first, and what is no number
 * is the best of all. A score is the number, or where row i has a temperature number / temperature + Gumbel noise, which is
 * keyed by the seed, the position behind that of the row's input, and the column (sampling/noise.py). Ids are exact up to
 * 2^24. Places of other shards become zeros: the sum over all shards is what each has found, exactly, but for the sign of a
 * zero. A draw with filters is of the columns that they leave: of the top_k best numbers, of those whose predecessors weigh
 * less than top_p of all that top_k leaves, and of those that are at least as likely as min_p says. It takes all columns of
 * the vocabulary: its one shard. */
typedef struct {
    hc_op op;
    uint64_t columns;
    const float *x;            /* [rows, columns] */
    uint64_t first;
    uint64_t shards;
    uint64_t shard;
    float *best;               /* [shards, rows, 2] */
    void *scratch;             /* hc_scratch_bytes of this op */
    const float *temperatures; /* [rows], of which 0 is none; NULL: no row has one. Read, as what follows, whenever it runs */
    const uint64_t *seeds;     /* [rows] */
    const int64_t *positions;  /* of the inputs */
    const int64_t *inputs;     /* [rows]: the input that each row is of; NULL: its own */
    const uint32_t *top_k;     /* [rows], of which 0 is all; NULL: no row has filters */
    const double *top_p;       /* [rows], of which 1 is all, and 0 */
    const double *min_logs;    /* [rows]: the logarithm of min_p, of which -INFINITY is all */
} hc_choose_op;

/* Of each draw takes the best of the shards, of equals the first; keeps it; and makes the inputs of a step that only
 * decodes those of the step that follows, with what was drawn. op.rows is the number of draws, which is that of inputs. */
typedef struct {
    hc_op op;
    uint64_t shards;
    const float *best;        /* [shards, rows, 2], as HC_CHOOSE has it */
    const int64_t *inputs;    /* [rows]: the row of the inputs that each draw is of */
    int64_t *token_ids;       /* [rows], as all of the inputs */
    int64_t *positions;
    int64_t *slot_mapping;
    int32_t *lengths;
    const int32_t *tables;    /* [rows, table_stride] block ids */
    uint64_t table_stride;
    uint64_t block_size;
    uint64_t *steps;          /* how many are kept: one more */
    int64_t *tokens;          /* [steps, rows] */
    float *scores;            /* [steps, rows] */
} hc_step_on_op;

enum hc_score { HC_SOFTMAX = 0, HC_SIGMOID = 1 };

/* Chooses each row's experts, best first, of equals the lower number, and weighs them.
 *
 * Logits are normed rows times weights, plus bias. Sums are of float32 and of one order, products are rounded before they are
 * added, and exponentials are made of such steps: who else computes so, chooses alike on any machine. Scores are logits, or
 * their sigmoids; the choice is by scores plus correction. It is among the groups whose two best have the largest sums.
 * Shares are softmax or sigmoid of the logits, divided by the sum of the chosen ones' if normalised, times scale. */
typedef struct {
    hc_op op;
    uint64_t type;            /* of hidden */
    uint64_t norm_type;
    uint64_t weight_type;     /* any of floats */
    uint64_t width;
    const void *hidden;       /* [rows, width] */
    const void *norm_weight;  /* [width] */
    double eps;
    const void *weight;       /* [experts, width] */
    const float *bias;        /* [experts], or NULL */
    const float *correction;  /* [experts], or NULL */
    const float *factors;     /* [experts]: of shares; or NULL */
    uint64_t experts;
    uint64_t per_token;
    uint64_t score;
    uint64_t is_normalised;
    double scale;
    uint64_t groups;
    uint64_t kept_groups;
    int64_t *chosen;          /* [rows, per_token] */
    float *shares;            /* [rows, per_token] */
    void *scratch;            /* hc_scratch_bytes of this op */
    uint64_t by_share;        /* whether choices are in the order of their shares, the largest first */
} hc_route_op;

/* A gated MLP; of an expert that is elsewhere, columns is 0. */
typedef struct {
    uint64_t columns;
    const hc_weight *gate_up[2]; /* one [gate | up, in] and NULL; or gate and up, [columns, in] each */
    const void *gate_up_bias;    /* [2 * columns], or NULL */
    const hc_weight *down;       /* [width, columns] */
    const void *down_bias;       /* [width], or NULL */
} hc_expert;

/* An adapter's factors for one part of a layer's outputs. */
typedef struct {
    uint64_t type;    /* HC_F32, HC_BF16 or HC_F16 */
    uint64_t rank;    /* at most HC_MAX_RANK; 0: the part stays as it is */
    const void *down; /* [rank, in] */
    const void *up;   /* [rank, columns of the part] */
} hc_factors;

/* y = the sum of the chosen experts' outputs, times their shares, in the order of the choice, and of the shared expert's, which is
 * first. Experts that are elsewhere add nothing. The first `skipped` and the last `late` of a row's choices are left out; late_y,
 * if it is given, is the sum of the last ones. */
typedef struct {
    hc_op op;
    uint64_t type;          /* of x, biases and y */
    uint64_t activation;
    double alpha;           /* of HC_CLAMPED_SWIGLU, as `limit` */
    double limit;
    uint64_t width;         /* of x and y */
    uint64_t columns;       /* of every expert but the shared one */
    uint64_t shared_columns; /* 0: there is none */
    uint64_t experts;
    uint64_t per_token;
    const hc_expert *table; /* [experts + 1], the shared one last; read whenever the operation runs */
    const void *x;          /* [rows, width] */
    const int64_t *chosen;  /* [rows, per_token], each in [0, experts) */
    const float *shares;    /* [rows, per_token] */
    int64_t *counts;        /* [experts]: grow by the choices of those that are here */
    void *y;                /* [rows, width] */
    void *scratch;          /* hc_scratch_bytes of this op */
    uint64_t skipped;       /* with `late` at most per_token */
    uint64_t late;
    void *late_y;           /* [rows, width], or NULL */
    const int64_t *numbers; /* [rows]: each row's adapter, as of hc_low_rank_op; NULL: no row has one */
    uint64_t adapters;
    const hc_factors *const *factors; /* [adapters]: [experts, 3] each, of gate, up and down; NULL: none. Read as `table` */
} hc_experts_op;

/* y += the products of each row's adapter, part by part: up transposed times (down times x). */
typedef struct {
    hc_op op;
    uint64_t type;           /* of x */
    uint64_t y_type;         /* that of x, or HC_F32 */
    uint64_t in;
    const void *x;           /* [rows, in] */
    uint64_t x_stride;       /* elements from row to row */
    uint64_t parts;          /* at least 1 */
    const uint64_t *ends;    /* [parts]: the column behind each part of y */
    void *y;                 /* [rows, ends[parts - 1]] */
    const int64_t *numbers;  /* [rows]: each row's adapter; 0, and what is not in the table: none */
    uint64_t adapters;
    const hc_factors *const *table; /* [adapters]: [parts] each, or NULL: none. Read, as the numbers, whenever it runs */
    void *scratch;           /* hc_scratch_bytes of this op */
} hc_low_rank_op;

/* The calling thread calls, the others wait. What is not 0 ends hc_run. */
typedef struct {
    hc_op op;
    int (*function)(void *, const void *, void *);
    void *first;
    const void *second;
    void *third;
} hc_call_op;

typedef struct hc_team hc_team;

/* First 16 hex digits of the sha256 of the sources it was built from, as they were told at build. */
HC_API const char *hc_source(void);

/* Names of the instruction sets that the library was built for and this processor has, best first; NULL behind the last.
 * "generic" is always there. */
HC_API const char *hc_isa(uint64_t index);
/* Compute with this one from now on, in all teams; none may be at work. 0, or -1 if there is no such. */
HC_API int hc_use(const char *isa);
/* The one in use. */
HC_API const char *hc_in_use(void);

/* Whoever calls hc_run and size - 1 others; `cpus` are the others' cores, or NULL to leave them where the system puts
 * them. Others that have nothing to do look for work for spin_ns, then sleep. NULL if it cannot be had (errno). */
HC_API hc_team *hc_team_new(uint64_t size, const int32_t *cpus, uint64_t spin_ns);
HC_API void hc_team_free(hc_team *team);
HC_API uint64_t hc_team_size(const hc_team *team);

/* Bytes of `values` (which 0), `scales` (1) or `minima` (2) of a weight of such a format and shape; 0 where there is
 * none. */
HC_API uint64_t hc_packed_bytes(const hc_weight *weight, uint64_t which);
/* What an operation needs for scratch in a team of such a size. */
HC_API uint64_t hc_scratch_bytes(const hc_op *op, uint64_t team_size);

/* Runs operations [begin, end); the calling thread is one of the team, and nobody else calls meanwhile. Returns end, or the index of the HC_CALL whose
 * function did not return 0, with what it returned in *status. */
HC_API uint64_t hc_run(hc_team *team, const hc_op *const *ops, uint64_t begin, uint64_t end, int *status);

#endif
