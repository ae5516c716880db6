/* activation(gate) * up, element by element. */
#include "gate.h"
#include "vectors.h"

/* x/2 (1 + tanh(u)) is x / (1 + e^-2u), with u = sqrt(2/pi) (x + 0.044715 x^3). */
V_INLINE vf gelu_tanh(vf x) {
    vf inner = v_fma(x * x * 0.044715f, x, x);
    return x / (1.0f + v_exp(inner * -1.5957691216f));
}

/* x/2 (1 + erf(x / sqrt 2)). erf(t) is t q(t^2) for small t, and 1 - e^p(t) for larger ones. */
V_INLINE vf gelu(vf x) {
    const vi sign = v_all_of(INT32_MIN);
    vf scaled = x * 0.70710678f, square = scaled * scaled;
    vf size = v_min(v_all(4.0f), v_bits(~sign & (vi)scaled));
    vf q = v_fma(v_all(7.88249711e-05f), square, v_all(-0.000801885499f));
    q = v_fma(q, square, v_all(0.00518931194f));
    q = v_fma(q, square, v_all(-0.0268543288f));
    q = v_fma(q, square, v_all(0.112835975f));
    q = v_fma(q, square, v_all(-0.376126269f));
    q = v_fma(q, square, v_all(1.12837917f));
    vf p = v_fma(v_all(-1.33093904e-05f), size, v_all(0.000317572035f));
    p = v_fma(p, size, v_all(-0.0034368676f));
    p = v_fma(p, size, v_all(0.0226219859f));
    p = v_fma(p, size, v_all(-0.10331898f));
    p = v_fma(p, size, v_all(-0.639093319f));
    p = v_fma(p, size, v_all(-1.12592595f));
    p = v_fma(p, size, v_all(-0.000756968617f));
    vf large = v_bits((vi)(1.0f - v_exp(p)) | (sign & (vi)scaled));
    vf erf = v_choose(size < v_all(1.0f), q * scaled, large);
    return 0.5f * x * (1.0f + erf);
}

/* Gates at most `limit`, ups between -limit and limit: (up + 1) * gate * sigmoid(alpha * gate). */
V_INLINE void gate_clamped(const hc_gated_op *op, const void *gates, const void *ups, uint64_t count, void *y,
                           const uint64_t type) {
    const vf limit = v_all((float)op->limit);
    for (uint64_t i = 0; i < count; i += HC_W) {
        uint64_t left = count - i;
        vf x = v_min(limit, v_load_up_to_as(hc_at(gates, i, type), left, type));
        vf up = v_min(limit, v_load_up_to_as(hc_at(ups, i, type), left, type));
        up = -v_min(limit, -up);
        vf gated = x / (1.0f + v_exp(x * -(float)op->alpha));
        v_store_up_to_as(hc_to(y, i, type), (up + 1.0f) * gated, left, type);
    }
}

V_INLINE void gate(vf (*activation)(vf), const void *gates, const void *ups, uint64_t count, void *y,
                   const uint64_t type) {
    uint64_t i = 0;
    for (; i + HC_W <= count; i += HC_W)
        v_store_as(hc_to(y, i, type),
                   activation(v_load_as(hc_at(gates, i, type), type)) * v_load_as(hc_at(ups, i, type), type), type);
    if (i < count)
        v_store_up_to_as(hc_to(y, i, type),
                         activation(v_load_up_to_as(hc_at(gates, i, type), count - i, type)) *
                             v_load_up_to_as(hc_at(ups, i, type), count - i, type),
                         count - i, type);
}

/* A row's columns. */
static void gate_row(const hc_gated_op *op, const void *gates, const void *ups, uint64_t count, void *y) {
    switch (op->activation) {
    case HC_SILU:
        V_TYPED(op->type, gate, v_silu, gates, ups, count, y);
        break;
    case HC_GELU_TANH:
        V_TYPED(op->type, gate, gelu_tanh, gates, ups, count, y);
        break;
    case HC_CLAMPED_SWIGLU:
        V_TYPED(op->type, gate_clamped, op, gates, ups, count, y);
        break;
    default:
        V_TYPED(op->type, gate, gelu, gates, ups, count, y);
    }
}

void HC_NAME(gate_rows)(const hc_gated_op *op, const hc_gate_rows *rows) {
    uint64_t type = op->type;
    for (uint64_t row = 0; row < rows->rows; row++)
        gate_row(op, hc_at(rows->gates, row * rows->gates_stride, type), hc_at(rows->ups, row * rows->ups_stride, type),
                 rows->columns, hc_to(rows->y, row * rows->y_stride, type));
}
