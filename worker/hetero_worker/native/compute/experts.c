/* A layer of experts: the rows of each are brought together, and go through its gated MLP; what comes out is added up row by row.
 *
 * Members share the work, not the experts: all panels of all experts at work are one line, in which a panel is as long as it
 * takes, and each member has an equal part of it. A part of an expert's panels is a smaller matrix, which the linear kernel
 * multiplies with as ever: so a row's bits are its own. What adapters add to the products is shared by choices. */
#include "experts.h"
#include "vectors.h"

extern hc_kernel HC_NAME(experts), HC_NAME(gated), HC_NAME(linear), HC_BASE_NAME(low_rank);

#define LEAST_COST 8 /* rows that a panel takes as long for as to be read from memory */
#define PIECE 64     /* columns that are one member's */
#define NOWHERE UINT32_MAX

enum { GATE_UP, DOWN };

/* Some of the operation's rows. */
typedef struct {
    const hc_experts_op *op;
    hc_experts_room room;
    uint64_t first, rows;
    hc_job *jobs; /* of experts at work, in their order, the shared one last; then one without an expert */
    uint32_t *places; /* [rows, per_token]: where a choice's result is, or NOWHERE */
} hc_round;

static char *at(const hc_round *round, uint64_t offset) { return (char *)round->op->scratch + offset; }

static uint64_t width_of(const hc_round *round) { return hc_width_of(round->op->type); }

/* Whether a choice of the round is computed: by its number, and the expert's. */
static int is_computed(const hc_experts_op *op, uint64_t choice, int64_t expert) {
    uint64_t place = choice % op->per_token, end = op->per_token - (op->late_y ? 0 : op->late);
    return op->table[expert].columns != 0 && place >= op->skipped && place < end;
}

/* Sorts choices by experts, counts them, and gives each expert its part of the memory. */
static uint64_t sort(const hc_round *round) {
    const hc_experts_op *op = round->op;
    uint64_t choices = round->rows * op->per_token;
    const int64_t *chosen = op->chosen + round->first * op->per_token;
    uint32_t *starts = (uint32_t *)at(round, round->room.starts), *from = (uint32_t *)at(round, round->room.from);
    memset(starts, 0, (op->experts + 1) * sizeof *starts);
    for (uint64_t i = 0; i < choices; i++)
        if (is_computed(op, i, chosen[i]))
            starts[chosen[i]]++;
    uint32_t begin = 0;
    for (uint64_t expert = 0; expert <= op->experts; expert++) {
        uint32_t count = starts[expert];
        if (count)
            op->counts[expert] += count;
        starts[expert] = begin;
        begin += count;
    }
    for (uint64_t i = 0; i < choices; i++) {
        int is_here = is_computed(op, i, chosen[i]);
        round->places[i] = is_here ? starts[chosen[i]]++ : NOWHERE;
        if (is_here)
            from[round->places[i]] = (uint32_t)(i / op->per_token);
    }
    return begin;
}

static hc_job job_of(const hc_round *round, uint64_t expert, uint64_t before, uint64_t rows, uint64_t elements) {
    return (hc_job){.expert = round->op->table + expert,
                    .rows = rows,
                    .gate_up = at(round, round->room.gate_up) + 2 * elements * width_of(round),
                    .gated = at(round, round->room.gated) + elements * width_of(round),
                    .y = (float *)at(round, round->room.y) + before * round->op->width};
}

/* Lists who has something to do. One member does. */
static void deal(const hc_round *round) {
    const hc_experts_op *op = round->op;
    const uint32_t *ends = (const uint32_t *)at(round, round->room.starts);
    const uint32_t *from = (const uint32_t *)at(round, round->room.from);
    uint64_t begin = 0, choices = sort(round); /* which has made ends of starts */
    hc_job *job = round->jobs;
    for (uint64_t expert = 0; expert < op->experts; begin = ends[expert++])
        if (ends[expert] > begin) {
            *job = job_of(round, expert, begin, ends[expert] - begin, begin * op->columns);
            job++->from = from + begin;
        }
    if (op->shared_columns)
        *job++ = job_of(round, op->experts, choices, round->rows, choices * op->columns);
    job->expert = NULL;
}

/* A product of a job: the columns of y from `column` on. */
typedef struct {
    const hc_weight *weight;
    uint64_t column;
} hc_matrix;

static hc_matrix matrix_of(const hc_job *job, int side, int number) {
    const hc_expert *expert = job->expert;
    if (side == DOWN)
        return (hc_matrix){number ? NULL : expert->down, 0};
    return (hc_matrix){expert->gate_up[number], number ? expert->columns : 0};
}

static uint64_t cost_of(const hc_job *job) { return job->rows > LEAST_COST ? job->rows : LEAST_COST; }

/* A job's rows [first, first + count) of normed states, one behind another. */
static const void *gather(const hc_round *round, const hc_job *job, uint64_t first, uint64_t count, char *room) {
    const hc_experts_op *op = round->op;
    uint64_t bytes = op->width * width_of(round);
    const char *x = (const char *)op->x + round->first * bytes;
    if (!job->from)
        return x + first * bytes;
    if (count == 1)
        return x + job->from[first] * bytes;
    for (uint64_t row = 0; row < count; row++)
        memcpy(room + row * bytes, x + job->from[first + row] * bytes, bytes);
    return room;
}

static const void *bias_at(const void *bias, uint64_t column, uint64_t type) {
    return bias ? hc_at(bias, column, type) : NULL;
}

/* Panels [begin, end) of a matrix are one, too. */
static hc_weight part_of(const hc_weight *weight, uint64_t begin, uint64_t end) {
    hc_weight part = *weight;
    uint64_t behind = end * HC_PANEL < weight->out ? end * HC_PANEL : weight->out;
    part.out = behind - begin * HC_PANEL;
    part.values = hc_panel(weight, begin);
    part.scales = weight->scales ? hc_panel_numbers(weight, weight->scales, begin) : NULL;
    part.minima = weight->minima ? hc_panel_numbers(weight, weight->minima, begin) : NULL;
    return part;
}

/* A job's rows with panels [begin, end) of one of its matrices. */
static void multiply(const hc_round *round, const hc_job *job, int side, const hc_matrix *matrix, uint64_t begin,
                     uint64_t end, char *own) {
    const hc_experts_op *op = round->op;
    const hc_expert *expert = job->expert;
    hc_weight part = part_of(matrix->weight, begin, end);
    hc_crew alone = {1, NULL};
    uint64_t column = matrix->column + begin * HC_PANEL;
    for (uint64_t first = 0; first < job->rows; first += HC_EXPERT_ROWS) {
        uint64_t count = job->rows - first < HC_EXPERT_ROWS ? job->rows - first : HC_EXPERT_ROWS;
        hc_linear_op one = {.op = {HC_LINEAR, count}, .weight = &part, .type = op->type};
        one.scratch = own + hc_gathered_bytes(op);
        if (side == GATE_UP) {
            one.x = gather(round, job, first, count, own);
            one.x_stride = op->width;
            one.y_type = op->type;
            one.y_stride = 2 * expert->columns;
            one.y = hc_to(job->gate_up, first * one.y_stride + column, op->type);
            one.bias = bias_at(expert->gate_up_bias, column, op->type);
        } else {
            one.x = hc_at(job->gated, first * expert->columns, op->type);
            one.x_stride = expert->columns;
            one.y_type = HC_F32;
            one.y_stride = op->width;
            one.y = job->y + first * op->width + column;
            one.bias = bias_at(expert->down_bias, column, op->type);
        }
        HC_NAME(linear)(&one.op, &alone, 0);
    }
}

/* A member's part of all products of one side: of the line, what begins within [begin, end). */
static void multiply_share(const hc_round *round, int side, const hc_crew *crew, uint64_t member, char *own) {
    uint64_t length = 0, place = 0, begin, end;
    hc_matrix matrix;
    for (const hc_job *job = round->jobs; job->expert; job++)
        for (int i = 0; i < 2 && (matrix = matrix_of(job, side, i)).weight; i++)
            length += cost_of(job) * hc_panels(matrix.weight);
    hc_share_of(length, crew->size, member, &begin, &end);
    for (const hc_job *job = round->jobs; job->expert; job++) {
        uint64_t cost = cost_of(job);
        for (int i = 0; i < 2 && (matrix = matrix_of(job, side, i)).weight; i++) {
            uint64_t panels = hc_panels(matrix.weight), first = 0, behind = 0;
            if (begin > place)
                first = (begin - place + cost - 1) / cost;
            if (end > place)
                behind = (end - place + cost - 1) / cost;
            behind = behind < panels ? behind : panels;
            if (first < behind)
                multiply(round, job, side, &matrix, first, behind, own);
            place += panels * cost;
        }
    }
}

/* The factors, of one side, of the adapter of a row of the round; NULL: it has none that changes experts. */
static const hc_factors *factors_of(const hc_round *round, uint64_t row, uint64_t expert, int side) {
    const hc_experts_op *op = round->op;
    uint64_t number = (uint64_t)op->numbers[round->first + row];
    const hc_factors *factors = number && number < op->adapters ? op->factors[number] : NULL;
    return factors ? factors + 3 * expert + (side == DOWN ? 2 : 0) : NULL;
}

/* Adds a row's adapter's products to those of a job. */
static void adapt_row(const hc_round *round, const hc_job *job, uint64_t row, int side, void *scratch) {
    const hc_experts_op *op = round->op;
    uint64_t from = job->from[row], columns = job->expert->columns, ends[] = {columns, 2 * columns};
    const hc_factors *table[] = {NULL, factors_of(round, from, (uint64_t)(job->expert - op->table), side)};
    if (!table[1])
        return;
    int64_t number = 1;
    hc_crew alone = {1, NULL};
    hc_low_rank_op one = {.op = {HC_LOW_RANK, 1}, .type = op->type, .y_type = op->type, .in = op->width, .parts = 2};
    one.x = hc_at(op->x, (round->first + from) * op->width, op->type);
    one.ends = ends;
    one.y = hc_to(job->gate_up, row * 2 * columns, op->type);
    if (side == DOWN) {
        one.y_type = HC_F32;
        one.in = columns;
        one.parts = 1;
        one.x = hc_at(job->gated, row * columns, op->type);
        ends[0] = op->width;
        one.y = job->y + row * op->width;
    }
    one.numbers = &number;
    one.adapters = 2;
    one.table = table;
    one.scratch = scratch;
    HC_BASE_NAME(low_rank)(&one.op, &alone, 0);
}

/* A member's part of what adapters add to one side of all choices. */
static void adapt_share(const hc_round *round, int side, const hc_crew *crew, uint64_t member, void *scratch) {
    uint64_t choices = ((const uint32_t *)at(round, round->room.starts))[round->op->experts], place = 0, begin, end;
    hc_share_of(choices, crew->size, member, &begin, &end);
    for (const hc_job *job = round->jobs; job->expert && job->from; place += job++->rows)
        for (uint64_t row = 0; row < job->rows; row++)
            if (place + row >= begin && place + row < end)
                adapt_row(round, job, row, side, scratch);
}

static void gate(const hc_round *round, hc_crew *crew, uint64_t member) {
    const hc_experts_op *op = round->op;
    uint64_t choices = ((const uint32_t *)at(round, round->room.starts))[op->experts];
    hc_gated_op one = {.op = {HC_GATED, choices}, .type = op->type, .activation = op->activation, .columns = op->columns};
    one.alpha = op->alpha;
    one.limit = op->limit;
    one.gate_up = at(round, round->room.gate_up);
    one.y = at(round, round->room.gated);
    HC_NAME(gated)(&one.op, crew, member);
    if (!op->shared_columns)
        return;
    uint64_t before = choices * op->columns;
    one.op.rows = round->rows;
    one.columns = op->shared_columns;
    one.gate_up = hc_at(one.gate_up, 2 * before, op->type);
    one.y = hc_to(one.y, before, op->type);
    HC_NAME(gated)(&one.op, crew, member);
}

/* Columns [begin, end) of a row's sum, or of its late one. */
static void add_up_row(const hc_round *round, uint64_t row, uint64_t begin, uint64_t end, int is_late) {
    const hc_experts_op *op = round->op;
    uint64_t split = op->per_token - op->late, first = is_late ? split : 0, behind = is_late ? op->per_token : split;
    uint64_t choices = ((const uint32_t *)at(round, round->room.starts))[op->experts];
    const float *results = (const float *)at(round, round->room.y);
    const float *shares = op->shares + (round->first + row) * op->per_token;
    const uint32_t *places = round->places + row * op->per_token;
    void *y = hc_to(is_late ? op->late_y : op->y, (round->first + row) * op->width, op->type);
    for (uint64_t column = begin; column < end; column += HC_W) {
        uint64_t left = end - column;
        vf sum = v_all(0);
        if (op->shared_columns && !is_late)
            sum = v_load_up_to(results + (choices + row) * op->width + column, left);
        for (uint64_t i = first; i < behind; i++)
            if (places[i] != NOWHERE)
                sum = v_fma(v_all(shares[i]), v_load_up_to(results + places[i] * op->width + column, left), sum);
        v_store_up_to_as(hc_to(y, column, op->type), sum, left, op->type);
    }
}

static void add_up(const hc_round *round, const hc_crew *crew, uint64_t member) {
    uint64_t width = round->op->width, pieces = (width + PIECE - 1) / PIECE, begin, end;
    hc_share_of(round->rows * pieces, crew->size, member, &begin, &end);
    while (begin < end) { /* what this member has of a row, at once */
        uint64_t row = begin / pieces, past = end < (row + 1) * pieces ? (end - row * pieces) * PIECE : width;
        add_up_row(round, row, begin % pieces * PIECE, past, 0);
        if (round->op->late_y)
            add_up_row(round, row, begin % pieces * PIECE, past, 1);
        begin = (row + 1) * pieces;
    }
}

void HC_NAME(experts)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_experts_op *op = (const hc_experts_op *)header;
    hc_round round = {.op = op, .room = hc_experts_room_of(op)};
    char *own = at(&round, round.room.bytes) + member * hc_experts_member_bytes(op);
    round.jobs = op->scratch;
    round.places = (uint32_t *)at(&round, round.room.places);
    for (; round.first < header->rows; round.first += round.room.rows) {
        uint64_t left = header->rows - round.first;
        round.rows = left < round.room.rows ? left : round.room.rows;
        if (!member)
            deal(&round);
        hc_meet(crew);
        multiply_share(&round, GATE_UP, crew, member, own);
        hc_meet(crew);
        if (op->numbers) {
            adapt_share(&round, GATE_UP, crew, member, own);
            hc_meet(crew);
        }
        gate(&round, crew, member);
        hc_meet(crew);
        multiply_share(&round, DOWN, crew, member, own);
        hc_meet(crew);
        if (op->numbers) {
            adapt_share(&round, DOWN, crew, member, own);
            hc_meet(crew);
        }
        add_up(&round, crew, member);
        if (round.first + round.rows < header->rows)
            hc_meet(crew); /* before what was read is written for the next ones */
    }
}
